"""Trials of a number, such as the size of fusion groups, in the first steps of training.

Source: DeAR (arXiv 2302.12445, section 4): each size is run for five steps, of which the first ones are not counted.
Rank 0 measures and decides; all workers hear of it in the same step, that of the end included.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

import torch

from spardl.clusters.base import Cluster, gather_rows
from spardl.schedules.tuning import Tuner

__all__ = ["Trials"]

# A step measures the communication of the one before, too, so the first two after a change are of both.
_SKIPPED, _COUNTED = 2, 3


class Trials:
    """Measures steps and names the size to use; see ``Tuner`` for the arguments."""

    def __init__(self, low: float, high: float, start: float, trials: int, seed: int) -> None:
        self._tuner = Tuner(low, high, start, trials, seed)
        self._done = False
        self._began: float | None = None
        self._seconds: list[float] = []

    def disturb(self) -> None:
        """The running step is not like others, for something else is done in it."""
        self._began = None

    def next(self, cluster: Cluster) -> float | None:
        """Is called when a step begins, by all workers.

        Returns:
            The size to use from now on, equal on all workers; ``None`` if it stays as it is.
        """
        if self._done:
            return None
        now = cluster.seconds()
        if self._began is not None:
            self._seconds.append(now - self._began)
        self._began = now
        if len(self._seconds) < _SKIPPED + _COUNTED:
            return None
        return self._decide(cluster)

    def _decide(self, cluster: Cluster) -> float:
        if cluster.leads:
            self._tuner.tell(median(self._seconds[_SKIPPED:]))
        mine = torch.tensor([self._tuner.proposal, self._tuner.done], dtype=torch.float64)
        size, done = gather_rows(cluster, [mine for _ in cluster.local_ranks])[0].tolist()
        self._done = bool(done)
        self._seconds = []
        return float(size)

    @property
    def progress(self) -> tuple[bool, int]:
        """Whether trials are over, and steps that were measured since the last change: equal on all workers."""
        return self._done, len(self._seconds)

    def state_dict(self) -> dict[str, Any]:
        """The finished trials; one that is under way begins anew."""
        return {"tuner": self._tuner.state_dict(), "done": self._done}

    def check_state(self, values: Any) -> None:
        """Accepts values that ``load_state_dict`` can continue from; changes nothing.

        Raises:
            KeyError: if something is missing.
            ValueError: if something is of another kind.
            ConfigError: if a size is outside of the bounds.
        """
        if not isinstance(values, Mapping) or type(values["done"]) is not bool:
            raise ValueError("trials have no 'done' of True or False")
        try:
            self._tuner.check_state(values["tuner"])
        except TypeError as error:
            raise ValueError(f"trials are broken: {error}") from error

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Continues from what ``state_dict`` gave."""
        self._tuner.load_state_dict(values["tuner"])
        self._done = values["done"]
        self._seconds, self._began = [], None
