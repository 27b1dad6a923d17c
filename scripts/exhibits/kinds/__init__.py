"""Kinds of exhibits: trainings, counts, predictions, traces and timings, and their tables."""
