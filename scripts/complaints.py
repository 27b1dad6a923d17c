"""Reports input errors of commands that compose configurations, each in one line."""

from __future__ import annotations

import sys

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from spardl.basics.errors import ConfigError

__all__ = ["REFUSALS", "complain"]

REFUSALS = (ConfigError, HydraException, OmegaConfBaseException, OSError, YAMLError)


def complain(error: Exception) -> None:
    """Prints the error without the search path that Hydra appends."""
    print(f"error: {' '.join(str(error).split('Config search path')[0].split())}", file=sys.stderr, flush=True)
