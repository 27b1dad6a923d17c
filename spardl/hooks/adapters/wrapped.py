"""The model as other people's trainers have wrapped it, and the method for it."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from spardl.basics.errors import ConfigError
from spardl.hooks.ddp import attach
from spardl.method.method import Method
from spardl.method.recipes import make_method

__all__ = ["distributed", "method_of"]


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


def method_of(method: str | Method, options: Mapping[str, Any]) -> Method:
    """The method that ``attach`` would make.

    Args:
        method: a name, or a method.
        options: of ``attach`` and of the method.

    Raises:
        ConfigError: if the method or an option is unknown.
    """
    own = signature(attach).parameters
    return make_method(method, **{key: each for key, each in options.items() if key not in own})
