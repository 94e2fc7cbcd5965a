"""Measurements of single work items, each beside its installed peers in the same process."""
