"""Training: a recipe becomes a run, a run a drafter. `loop.py` is a batch's journey."""
