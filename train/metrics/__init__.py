"""Figures of a run: measured, logged, drawn, and what they say of overfitting."""
