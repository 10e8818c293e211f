"""Kernels written in Triton, for rounds on a GPU."""
