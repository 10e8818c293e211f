"""What drafters are trained with: losses, teachers, alignment. Sums with counts, always."""
