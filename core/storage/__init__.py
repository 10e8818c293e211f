"""Files and folders: whole or absent, bounded, and named for what they hold."""
