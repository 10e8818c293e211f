"""Images of training data: checked, read, expanded among the tokens, kept."""
