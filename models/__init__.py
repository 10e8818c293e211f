"""Causal language models behind one interface (`core.language_model`): any model of transformers,
and our own forward for Llama-shaped ones with its kernels, rotary positions and compiled rounds."""
