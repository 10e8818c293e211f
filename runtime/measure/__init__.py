"""What is measured: acceptance, speed, the cost of a round, comparisons."""
