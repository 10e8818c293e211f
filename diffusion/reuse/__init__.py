"""What a pass computes and what it takes from earlier ones: one file per way."""
