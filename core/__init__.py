"""The domain: what every room speaks of, and what imports nothing of ours. Trees, vocabularies,
KV caches, the contract of a drafter, outcomes, errors, whole-or-nothing files."""
