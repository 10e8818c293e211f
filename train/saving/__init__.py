"""What keeps a run: checkpoints, whole files, state, fingerprints, the lock of a run folder."""
