"""Which shape of a draft model is fastest here: latency, acceptance, and the ranking by both."""
