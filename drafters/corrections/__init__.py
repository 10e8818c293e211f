"""Corrections of a block: what puts its slots in the light of the tokens before, and its parts."""
