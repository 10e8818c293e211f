"""How weights are kept: the layouts of checkpoints, copies that serving reads, few bits."""
