"""A decoding step in C++: the forward of a Llama-shaped model for a few tokens, in one call.

`step.cpp` is compiled where it runs, by the machine's own compiler and for its own instructions,
once (`library.py`); `step.py` calls it. Where there is no compiler, or the tensors are of another
kind, the forward of `fast_llama.py` in PyTorch does the same. `kl.py` calls what training compares
logits with.
"""
