"""Text becomes rows: sources, chat templates, packing, answers by the target, held-out prompts."""
