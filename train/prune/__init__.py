"""Draft models cut out of a target."""
