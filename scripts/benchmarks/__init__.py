"""Benchmarks of scripts/bench.py, and their shared code: turns, emulated models, links and DDP hooks."""
