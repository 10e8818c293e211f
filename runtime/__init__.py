"""Generation with a drafter: target, engine, verification, policies, proofs, measurements,
server."""
