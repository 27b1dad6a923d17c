"""Sparse gradient communication for distributed training."""

from spardl.version import __version__

__all__ = ["__version__"]
