"""Layers on the target's features or its keys and values, which draft token by token."""
