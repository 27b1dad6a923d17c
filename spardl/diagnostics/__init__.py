"""Before a training: how long will a step take, what pays, is the cluster well."""

from spardl.diagnostics.choosing import Advice, Choice

__all__ = ["Advice", "Choice"]
