"""The exhibits of each paper."""
