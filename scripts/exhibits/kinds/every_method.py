"""Comparison of all documented methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from scripts.exhibits.kinds.trainings import ALONE, DENSE, MethodComparison
from scripts.pages.methods import documented

__all__ = ["LEFT_OUT", "EveryMethod"]

# Parts of other methods, and methods with a dense warm-up longer than these trainings.
LEFT_OUT = frozenset({"none", "topk", "cast", "quantized", "oktopk_vgg", "oktopk_lstm", "oktopk_bert"})


def _methods() -> Mapping[str, tuple[str, ...]]:
    rows = {each: (f"compressor={each}",) for each in sorted(documented()) if each not in LEFT_OUT}
    return {"none": DENSE, "alone": ALONE, **rows}


@dataclass(frozen=True)
class EveryMethod(MethodComparison):
    """Dense training, a single worker, and every documented method as published."""

    methods: Mapping[str, tuple[str, ...]] = field(default_factory=_methods, kw_only=True)
