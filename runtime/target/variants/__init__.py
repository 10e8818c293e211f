"""Targets made of another: with an adapter, in few bits, inflated, mixed, trained elsewhere."""
