"""Logits become distributions here and nowhere else: settings, processors, noise, grammars."""
