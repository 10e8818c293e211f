"""Proofs on a pair: exact enumeration, statistics, `verify()`."""
