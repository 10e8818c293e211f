"""Text becomes rows: `prepare.py` makes them of what the rooms read, which import one way."""
