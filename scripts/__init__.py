"""The programs beside train.py, one a file, and the rooms of what they share."""
