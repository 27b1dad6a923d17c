"""What ``recipe=`` in a configuration stands for: how papers have their methods, or what has proved better since."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spardl.basics.checks import check_choice
from spardl.method.momentum import AutoMomentum, OptimizerMomentum
from spardl.method.recipes import RECIPES

__all__ = ["settled"]

_AUTO, _OPTIMIZER = (f"spardl.{kind.__name__}" for kind in (AutoMomentum, OptimizerMomentum))


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
    if recipe == "published" and plain.get("momentum", {}).get("_target_") == _AUTO:
        plain["momentum"] = {"_target_": _OPTIMIZER}
    return plain
