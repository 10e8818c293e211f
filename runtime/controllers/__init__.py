"""Controllers: which configuration speculates in the next round, if any does."""
