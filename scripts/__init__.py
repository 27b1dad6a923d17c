"""Programs other than train.py, one per file, and the packages that they share."""
