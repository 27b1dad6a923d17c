"""Early stopping: ends a run whose metric no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spardl.basics.checks import is_number
from spardl.basics.errors import ConfigError
from trainer.task import Task

__all__ = ["EarlyStopping", "Stopper"]


@dataclass(frozen=True)
class EarlyStopping:
    """Settings of early stopping: the node ``training.early_stopping`` of a configuration.

    Args:
        patience: Number of evaluations in a row without improvement that end the run; ``None`` never ends it early.
        metric: Metric to watch; ``None`` for the task's main metric.
        mode: Whether a higher (``max``) or a lower (``min``) value is an improvement. ``None`` uses the direction of
            the task's main metric, and ``min`` for the loss.

    Raises:
        ConfigError: If a value is out of range.
    """

    patience: int | None = None
    metric: str | None = None
    mode: str | None = None

    def __post_init__(self) -> None:
        where = "training.early_stopping"
        if self.patience is not None and not (is_number(int, self.patience) and self.patience >= 1):
            raise ConfigError(f"{where}.patience must be an integer, at least 1, or null, got {self.patience!r}")
        if self.mode not in ("max", "min", None):
            raise ConfigError(f"{where}.mode must be max, min or null, got {self.mode!r}")
        if self.metric is not None and not isinstance(self.metric, str):
            raise ConfigError(f"{where}.metric must be the name of a metric or null, got {self.metric!r}")
        if self.patience is None and (self.metric, self.mode) != (None, None):
            raise ConfigError(f"{where}.metric and mode have no effect without {where}.patience; set it as well")

    def check(self, task: Task) -> None:
        """Checks that a task has the watched metric.

        Raises:
            ConfigError: If the task has no such metric, or its direction is unknown.
        """
        if self.patience is None or self.metric in (None, task.metric):
            return
        # The sums of an evaluation are not known yet; any values give the names.
        known = task.summarize(dict.fromkeys(task.sums, 1.0))
        if self.metric not in known:
            raise ConfigError(
                f"training.early_stopping.metric={self.metric} is not a metric of this task; choose one of "
                f"{', '.join(known)}"
            )
        if self.mode is None and self.metric != "loss":
            raise ConfigError(
                f"training.early_stopping.metric={self.metric} has no known direction; set "
                "training.early_stopping.mode to max or min"
            )

    def higher_is_better(self, task: Task) -> bool:
        """Returns whether a higher value of the watched metric is better."""
        if self.mode is not None:
            return self.mode == "max"
        return task.higher_is_better if self.metric in (None, task.metric) else False


class Stopper:
    """Counts evaluations without improvement; all workers count the same, because they get the same metrics.

    Args:
        settings: Settings that define when to stop.
        task: Task whose metrics are watched.
    """

    def __init__(self, settings: EarlyStopping, task: Task) -> None:
        self._settings, self._name = settings, settings.metric or task.metric
        self._sign = 1.0 if settings.higher_is_better(task) else -1.0
        self._best: float | None = None
        self._best_step = self._last_step = self._waited = 0

    @property
    def watches(self) -> bool:
        """Whether early stopping is enabled."""
        return self._settings.patience is not None

    @property
    def stops(self) -> bool:
        """Whether the run must end now, because the last ``patience`` evaluations brought no improvement."""
        return self._settings.patience is not None and self._waited >= self._settings.patience

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Counts the evaluation after ``step`` steps; ignores an evaluation that is repeated after a restart."""
        if not self.watches or step <= self._last_step:
            return
        self._last_step, value = step, metrics[self._name]
        if not math.isnan(value) and (self._best is None or self._sign * value > self._sign * self._best):
            self._best, self._best_step, self._waited = value, step, 0
        else:
            self._waited += 1

    def outcome(self) -> dict[str, Any]:
        """Returns entries for the summary of a run that ended early; empty for other runs.

        They state the watched metric, its best value, the step of that value, and the number of evaluations since.
        """
        if not self.stops:
            return {}
        found = {"metric": self._name, "best": self._best, "best_step": self._best_step, "patience": self._waited}
        return {"early_stopping": found}

    def state_dict(self) -> dict[str, Any]:
        """Returns the best value and the counts for a checkpoint; empty if early stopping is disabled."""
        if not self.watches:
            return {}
        names = ("_best", "_best_step", "_last_step", "_waited")
        return {"early_stopping": {name[1:]: getattr(self, name) for name in names}}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Restores the result of ``state_dict``; an empty mapping changes nothing."""
        for name, value in values.get("early_stopping", {}).items():
            setattr(self, f"_{name}", value)
