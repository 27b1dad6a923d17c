"""How long and how to train: the ``training`` node of a configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from spardl.basics.checks import is_a
from spardl.basics.errors import ConfigError

__all__ = ["PRECISIONS", "Precision", "Settings"]


@dataclass(frozen=True)
class Precision:
    """Number formats of a run.

    Attributes:
        weights: type of parameters, gradients and residuals.
        autocast: type that matrix products are computed in, or ``None`` for the weights' own.
    """

    weights: torch.dtype
    autocast: torch.dtype | None = None

    @property
    def scales(self) -> bool:
        """Whether losses are scaled, since gradients would vanish otherwise."""
        return self.autocast == torch.float16


PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        "fp32": Precision(torch.float32),
        "fp64": Precision(torch.float64),
        "bf16": Precision(torch.float32, torch.bfloat16),
        "fp16": Precision(torch.float32, torch.float16),
    }
)


@dataclass(frozen=True)
class Settings:
    """Everything about the loop that is neither the task nor the method.

    Args:
        seed: of weights, data order, augmentation and dropout.
        epochs: passes over the data; may be a fraction.
        max_steps: ends the run early, after so many steps; ``None`` for no limit.
        batch_size: examples per worker in one backward pass.
        eval_batch_size: examples per worker in one evaluation pass.
        accumulation: backward passes per step; the step's batch is so many times larger.
        clip_norm: largest 2-norm of the averaged gradient, or of each worker's own where its momentum is moved before
            compression or its optimizer steps alone; ``None`` for no clipping.
        precision: fp32 or fp64; bf16 or fp16: matrix products in these, weights in float32; fp16 scales losses.
        log_every: steps between two lines of metrics.
        eval_every: epochs between two evaluations; the last step is always followed by one.
        eval_examples: test examples that an evaluation uses, evenly spread; ``None`` for all.
        untimed_steps: steps after the start, or a continuation, that samples per second leave out.
        checkpoint_every: steps between two checkpoints; ``None`` for one per epoch.
        keep_checkpoints: how many are kept.
        check_every: steps between two checks that all workers computed the same average.
        elastic: whether the number of workers may change when a run is continued.

    Raises:
        ConfigError: if a value is out of range.
    """

    seed: int
    epochs: float
    max_steps: int | None
    batch_size: int
    eval_batch_size: int
    accumulation: int
    clip_norm: float | None
    precision: str
    log_every: int
    eval_every: float
    eval_examples: int | None
    untimed_steps: int
    checkpoint_every: int | None
    keep_checkpoints: int
    check_every: int
    elastic: bool

    def __post_init__(self) -> None:
        self._demand("seed", is_a(int, self.seed), "a whole number")
        self._demand("seed", -(2**63) <= self.seed < 2**64, "from -2^63 to 2^64 - 1")
        untimed = is_a(int, self.untimed_steps) and self.untimed_steps >= 0
        self._demand("untimed_steps", untimed, "a whole number, at least 0")
        for name in ("batch_size", "eval_batch_size", "accumulation", "log_every", "keep_checkpoints", "check_every"):
            self._demand(name, self._counts(name), "a whole number, at least 1")
        for name in ("max_steps", "checkpoint_every", "eval_examples"):
            self._demand(name, getattr(self, name) is None or self._counts(name), "a whole number, at least 1, or null")
        for name in ("epochs", "eval_every"):
            self._demand(name, self._positive(name), "a number above 0")
        self._demand("clip_norm", self.clip_norm is None or self._positive("clip_norm"), "a number above 0, or null")
        self._demand("elastic", isinstance(self.elastic, bool), "true or false")
        self._demand("precision", self.precision in PRECISIONS, f"one of {', '.join(PRECISIONS)}")

    def _counts(self, name: str) -> bool:
        return is_a(int, getattr(self, name)) and getattr(self, name) >= 1

    def _positive(self, name: str) -> bool:
        return is_a(float, getattr(self, name)) and 0 < getattr(self, name) < math.inf

    def _demand(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise ConfigError(f"training.{name} must be {wanted}, got {getattr(self, name)!r}")

    @property
    def formats(self) -> Precision:
        """The number formats that ``precision`` names."""
        return PRECISIONS[self.precision]

    def total_steps(self, steps_per_epoch: int, shift: int = 0) -> int:
        """Steps of the whole run.

        Args:
            steps_per_epoch: with the present number of workers.
            shift: steps that were done with other numbers of workers, beyond those that as many examples take now.
        """
        steps = max(1, round(self.epochs * steps_per_epoch) + shift)
        return steps if self.max_steps is None else min(steps, self.max_steps)
