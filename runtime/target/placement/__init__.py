"""Where the parts of a target run, and the bytes that they take there."""
