"""What each argument may be: a target, a drafter, prompts, images, a recipe, a place to write."""
