"""Estimates time and memory of a run before its first step, and shows the progress of that step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from spardl.clusters import Cluster
from trainer.display import clock
from trainer.learner import Learner, Plan, autocast
from trainer.memory import Need

__all__ = ["Estimate", "estimate", "tracking"]

# Smaller models show the remaining time within seconds.
_PARAMETERS = 5_000_000
# A backward pass takes about twice the time of its forward pass.
_PASSES = 3.0
_EXAMPLES = 4


@dataclass(frozen=True)
class Estimate:
    """Estimated time and memory of a run.

    Attributes:
        step: Estimated duration of a step in seconds: forward and backward passes only, without selection,
            communication and updates.
        steps: Number of steps that remain.
        processes: Number of processes.
        need: Memory that each process needs, excluding activations.
    """

    step: float
    steps: int
    processes: int
    need: Need

    @property
    def text(self) -> str:
        """The estimate in one line, for the user."""
        memory = f"{self.processes} x {self.need.whole / 1e9:.2g} GB and activations"
        return (
            f"estimate: at least {_seconds(self.step)} a step (forward and backward passes), {memory}, "
            f"{_seconds(self.step * self.steps)} for {self.steps} steps"
        )

    @property
    def first(self) -> str:
        """Text that is shown while the first step runs; contains the estimated duration of the step."""
        return f"first step, at least {_seconds(self.step)}"


def estimate(plan: Plan, learner: Learner, cluster: Cluster, steps: int) -> Estimate | None:
    """Estimates time and memory of a run from the evaluation of a few examples.

    Args:
        plan: Plan of the run.
        learner: Learner with the model and the local workers; its state is not changed.
        cluster: Workers that train together. All of them call this function, so that they share the processors as they
            will during training.
        steps: Number of steps that remain.

    Returns:
        The estimate; ``None`` for models with less than five million parameters.
    """
    if learner.gradient.vector.numel() < _PARAMETERS:
        return None
    settings, local = plan.settings, len(learner.workers)
    few = min(_EXAMPLES, settings.batch_size, len(plan.task.test))
    learner.model.eval()
    _forward(plan, learner, 1)  # loads libraries and fills caches
    once, more = _forward(plan, learner, 1), _forward(plan, learner, few)
    learner.model.train()
    # Small batches have a constant share.
    each = max(0.0, more - once) / (few - 1) if few > 1 else once
    passes = settings.accumulation * local
    seconds = _PASSES * passes * (once + each * (settings.batch_size - 1))
    need = Need.of(
        learner.model, settings.formats.weights, plan.optimizer, plan.method, local, alone=plan.schedule.alone
    )
    return Estimate(seconds, steps, cluster.size // local, need)


def _forward(plan: Plan, learner: Learner, examples: int) -> float:
    device = next(learner.model.parameters()).device
    batch = plan.task.test.batch(torch.arange(examples), None)
    began = time.perf_counter()
    with torch.no_grad(), autocast(device, plan.settings.formats):
        plan.task.measure(learner.model, batch).sum().item()  # waits for a GPU
    return time.perf_counter() - began


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value < 99.5 else f"{clock(value)} min" if value < 3600 else f"{value / 3600:.2g} hours"


@contextmanager
def tracking(model: nn.Module, passes: int, tell: Callable[[float], None]) -> Iterator[None]:
    """Reports the progress of a training step that runs in the body of the ``with`` statement.

    Hooks of the model measure the progress; they are removed at the end of the ``with`` statement.

    Args:
        model: Model whose passes are tracked.
        passes: Number of forward passes in this process during the step; each is followed by a backward pass.
        tell: Function that receives the completed fraction of the step, at most once for each percent.
    """
    counter = _Counter(passes * _PASSES * sum(parameter.numel() for parameter in model.parameters()), tell)
    handles = counter.attach(model)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Counter:
    """Counts parameters: one unit for its forward pass, two for its backward pass."""

    def __init__(self, whole: float, tell: Callable[[float], None]) -> None:
        self._whole, self._tell = whole, tell
        self._done, self._told = 0.0, 0
        self._used: set[nn.Module] = set()

    def attach(self, model: nn.Module) -> list[Any]:
        handles: list[Any] = []
        known: set[nn.Parameter] = set()
        for module in model.modules():
            own = {*module.parameters(recurse=False)} - known  # tied weights count once
            if own:
                entries = sum(parameter.numel() for parameter in own)
                handles.append(module.register_forward_hook(partial(self._forward, entries)))
            trained = (parameter for parameter in own if parameter.requires_grad)
            handles.extend(parameter.register_post_accumulate_grad_hook(self._backward) for parameter in trained)
            known |= own
        return handles

    def _forward(self, entries: int, module: nn.Module, *given: Any) -> None:
        if module not in self._used:  # a recurrent model calls it several times in one pass
            self._used.add(module)
            self._add(entries)

    def _backward(self, parameter: torch.Tensor) -> None:
        self._used.clear()
        self._add((_PASSES - 1) * parameter.numel())

    def _add(self, units: float) -> None:
        self._done += units
        percent = min(100, int(100 * self._done / self._whole))
        if percent > self._told:
            self._told = percent
            self._tell(percent / 100)
