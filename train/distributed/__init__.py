"""Several processes as one run: sums over ranks, sharded weights, sharded Muon."""
