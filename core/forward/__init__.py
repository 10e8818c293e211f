"""What one forward of a model is given beside its tokens, and what it leaves behind."""
