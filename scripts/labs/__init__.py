"""Processes that run inside the network labs of scripts/netlab.py."""
