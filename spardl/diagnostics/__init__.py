"""Tools to use before training: predict step times, recommend a method, and check the cluster."""

from spardl.diagnostics.choosing import Advice, Choice

__all__ = ["Advice", "Choice"]
