"""The name and place that transformers wants of a folder with a way to generate."""
