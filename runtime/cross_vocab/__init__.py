"""Drafting by a language model of another tokenizer, losslessly."""
