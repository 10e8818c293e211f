"""One round, and what surrounds it: requests, the scheduler, prefill, commit, lazy and guarded
drafters."""
