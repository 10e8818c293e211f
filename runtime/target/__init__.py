"""A target: loaded, placed, inflated, fingerprinted, saved."""
