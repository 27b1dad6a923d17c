"""Submission of train.py sweeps as jobs: composition, checks, execution on Slurm or locally, and states."""
