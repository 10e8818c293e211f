"""What the target says of the rows, kept on disk."""
