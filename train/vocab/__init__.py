"""Draft vocabularies: counted, predicted, chosen, measured, trimmed."""
