"""Flat checkpoints for SGLang, one module per kind of drafter: how it is written, and by which
reader what was written is judged. `export.formats.sglang` lists them."""
