"""Images as tokens: a codebook of patches, the grid that a picture is, and ways to decode grids."""
