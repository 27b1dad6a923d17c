"""Data sets in memory; each module has a function that reads or generates one."""
