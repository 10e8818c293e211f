"""Scripts that run under an engine's own Python; they import nothing of specctl."""
