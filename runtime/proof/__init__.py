"""Proofs on a pair: exact enumeration, scalar reference rules, statistics, `verify()`."""
