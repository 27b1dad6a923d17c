"""Faults for real runs: how each is caused at a random moment, and what is expected of a run that suffers it."""
