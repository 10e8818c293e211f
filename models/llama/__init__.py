"""Llama-shaped models by our own forward: their parameters, rounds of few tokens, smaller cuts."""
