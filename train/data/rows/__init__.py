"""Documents packed into rows of one length, kept on disk, and in which order steps read them."""
