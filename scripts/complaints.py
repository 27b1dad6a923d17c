"""What bad words, files and values end in where a command composes configurations, and how it is told: in one line."""

from __future__ import annotations

import sys

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from spardl.basics.errors import ConfigError

__all__ = ["REFUSALS", "complain"]

REFUSALS = (ConfigError, HydraException, OmegaConfBaseException, OSError, YAMLError)


def complain(error: Exception) -> None:
    """Says what is wrong, without the search path that Hydra puts behind it."""
    print(f"error: {' '.join(str(error).split('Config search path')[0].split())}", file=sys.stderr, flush=True)
