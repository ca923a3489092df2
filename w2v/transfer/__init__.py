"""Engines, links and caches: where rows are, and how they move."""
