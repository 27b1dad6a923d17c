"""The checks of ``spardl doctor``: what is installed, who reaches whom, how fast, and how right."""
