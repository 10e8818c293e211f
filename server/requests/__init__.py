"""What a request may say: its body, its fields and their bounds, and what the engine is asked."""
