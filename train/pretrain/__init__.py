"""The embedded target from nothing."""
