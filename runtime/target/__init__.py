"""A target: loaded, placed, fingerprinted, saved."""
