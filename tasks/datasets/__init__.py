"""Data sets, and functions that download, read, generate and cache them."""
