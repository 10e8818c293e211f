"""An OpenAI-compatible HTTP server around one engine thread."""
