"""Tools to use before training: predict step times, recommend a method, and check the cluster."""

from spardl.diagnostics.advice import Advice, Choice

__all__ = ["Advice", "Choice"]
