"""Benchmarks of scripts/bench.py, and their shared code: turns, links and DDP hooks."""
