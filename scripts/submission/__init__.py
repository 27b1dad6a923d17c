"""Sweeps of train.py as jobs: composed and checked, sent to Slurm or run here, and looked after."""
