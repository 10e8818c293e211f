"""Masked diffusion language models: their folders, their model, and the engine that denoises.

A text is a canvas of positions, at first masked; every pass of the model guesses all masked tokens
at once, and some of them are kept. Which are kept (`unmask/`) and what a pass computes (`reuse/`)
are one file per way; `engine.py` is the loop.
"""
