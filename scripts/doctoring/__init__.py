"""The checks of ``scripts/doctor.py``."""
