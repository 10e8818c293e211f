"""What drafters remember of live rows while they serve: one class per way to draft."""
