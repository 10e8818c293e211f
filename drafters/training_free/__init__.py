"""Drafts from text and from the target's predictions, without training."""
