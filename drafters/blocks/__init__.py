"""Blocks of masked slots on the target's features, filled in one pass."""
