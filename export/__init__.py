"""Packages, exports to engines, imports of published drafters."""
