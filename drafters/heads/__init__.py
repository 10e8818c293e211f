"""Heads on the target's last state."""
