"""Prompts cut out of records, answers to them, held-out prompts, public suites."""
