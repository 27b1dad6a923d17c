"""Tables and figures of the papers (exhibits), each made by one command of scripts/reproduce.py."""
