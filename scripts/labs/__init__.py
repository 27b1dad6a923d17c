"""Processes inside the network labs of scripts/netlab.py."""
