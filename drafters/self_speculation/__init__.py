"""The target drafts for itself: with fewer layers, fewer bits, or by leaving early."""
