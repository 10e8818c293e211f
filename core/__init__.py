"""The domain: the types that every package here uses, and that import nothing of ours. Trees,
vocabularies, KV caches, the contract of a drafter, outcomes, errors, whole-or-nothing files."""
