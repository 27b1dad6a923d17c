"""What a configuration leaves open, and what that comes to: ``recipe=``, and ``scope=auto`` of a compressor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from spardl.basics.checks import check_choice
from spardl.compressors.budget import AUTO, Budget
from spardl.method import registry
from spardl.method.momentum import AutoMomentum, OptimizerMomentum
from spardl.method.recipes import RECIPES
from spardl.schedules.outer import OuterSteps

__all__ = ["scoped", "settled"]

_AUTO, _OPTIMIZER, _OUTER = (f"spardl.{kind.__name__}" for kind in (AutoMomentum, OptimizerMomentum, OuterSteps))
_ADAM = tuple(
    f"{module}.{kind.__name__}"
    for kind in (torch.optim.Adam, torch.optim.AdamW)
    for module in ("torch.optim", kind.__module__)
)


def settled(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration in which everything is said that its recipe stands for, and so needs none.

    Args:
        config: plain data.

    Raises:
        ConfigError: if there is no such recipe.
    """
    plain = dict(config)
    recipe = plain.pop("recipe", RECIPES[0])
    check_choice("recipe", recipe, RECIPES)
    if recipe == "published" and _target(plain, "momentum") == _AUTO:
        plain["momentum"] = {"_target_": _OPTIMIZER}
    return plain


def scoped(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration whose compressor's scope is ``auto`` only where that is chunks; see ``spardl.method.moving``.

    So a run in which it is the whole model has the id that it had before there was such a choice.

    Args:
        config: plain data, settled.
    """
    compressor = config.get("compressor") or {}
    if compressor.get("scope") != AUTO or (_moves_adam(config) and _takes_chunks(compressor)):
        return dict(config)
    return {**config, "compressor": {**compressor, "scope": "model"}}


def _target(plain: Mapping[str, Any], node: str) -> Any:
    return (plain.get(node) or {}).get("_target_")


def _moves_adam(plain: Mapping[str, Any]) -> bool:
    moves = _target(plain, "momentum") == _AUTO and _target(plain, "schedule") != _OUTER
    return moves and _target(plain, "optimizer") in _ADAM


def _takes_chunks(compressor: Mapping[str, Any]) -> bool:
    kinds = {f"spardl.{kind.__name__}": kind for kind in registry.compressors().values() if issubclass(kind, Budget)}
    kind = kinds.get(compressor["_target_"])
    return kind is not None and kind.takes_chunks(compressor["scope"], compressor.get("density"))
