"""The one thread that owns the engine, and what lies between it and the event loops."""
