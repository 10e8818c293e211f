"""Training drafter and target together (Medusa-2)."""
