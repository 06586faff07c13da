"""Checks in numbers: golden vectors of the methods, and the duality of the two axes."""
