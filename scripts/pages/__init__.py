"""Generated pages and blocks of the documentation, which scripts/docs.py writes and checks."""
