"""Recipes: the YAML files, their schema, and how they are read."""
