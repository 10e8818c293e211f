"""A target in a GGUF file: its configuration, tokenizer, weights, and the model made of them."""
