"""The tables and figures of the papers, each made anew by one command; see scripts/reproduce.py."""
