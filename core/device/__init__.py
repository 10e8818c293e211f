"""What a GPU and the memory of the process do for whoever computes."""
