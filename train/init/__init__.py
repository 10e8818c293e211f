"""A drafter's first weights: fresh, from the target's layers, or from another drafter."""
