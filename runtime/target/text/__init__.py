"""Into a target and out of it: prompts with images, their limits, texts as they grow."""
