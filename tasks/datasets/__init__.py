"""Data sets in memory; one function reads or generates each."""
