"""Chat templates, run under bounds: what they take, their tokens, where a text ends."""
