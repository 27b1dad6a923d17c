"""The model as other people's trainers have wrapped it."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from spardl.basics.errors import ConfigError

__all__ = ["distributed"]


def distributed(model: nn.Module, launcher: str) -> DistributedDataParallel:
    """The model, if it is distributed by DDP.

    Raises:
        ConfigError: if it is not.
    """
    model = getattr(model, "_orig_mod", model)  # where torch.compile put it
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(
            f"the model is a {type(model).__name__}, not distributed by DDP: start several workers ({launcher}), "
            "without another way to distribute the model"
        )
    return model
