"""Frames of trained drafters: what the families of one kind share, beside their modules."""
