"""Shared code of the programs bench_*.py: alternating measurements, emulated models, links, and DDP hooks."""
