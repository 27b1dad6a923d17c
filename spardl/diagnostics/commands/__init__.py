"""The commands of ``spardl``, one a file."""
