"""Which guessed tokens of a pass are kept: one file per way."""
