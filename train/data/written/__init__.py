"""What the target writes: answers to prompts, and prompts of its own, kept as they come."""
