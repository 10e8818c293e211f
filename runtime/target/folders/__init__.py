"""Checkpoints as they lie on disk or at the hub: files, tokenizers, names of weights."""
