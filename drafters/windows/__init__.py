"""Windows of guesses that the target's own passes correct (Jacobi iteration)."""
