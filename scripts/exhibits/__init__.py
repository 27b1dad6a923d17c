"""Tables and figures of the papers, each made by one command; see scripts/reproduce.py."""
