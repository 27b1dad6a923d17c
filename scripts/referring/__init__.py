"""What ``scripts/api_reference.py`` reads and writes."""
