"""Trained tokens, rows and states by which the target says several tokens at once."""
