"""The checks of ``spardl doctor``: installation, reachability, speed and correctness."""
