"""A task that trains in milliseconds, and what it takes to run a plan in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spardl.clusters import Network, SimulatedCluster
from spardl.method.method import Method
from spardl.schedules import AfterBackward
from trainer.learner import Plan, Settings
from trainer.lr import Constant, LrSchedule
from trainer.observers import Observer
from trainer.runs import Run
from trainer.task import Batch, Task
from trainer.trainer import Trainer

FEATURES, CLASSES = 6, 3


class Points:
    """Random points with labels; a generator adds noise, as an augmentation would."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.points = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
        self.labels = self.points[:, :CLASSES].argmax(1)

    def __len__(self) -> int:
        return len(self.points)

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> Batch:
        points = self.points[indices]
        if generator is not None:
            points = points + 0.1 * torch.randn(points.shape, generator=generator, dtype=torch.float64)
        return {"points": points, "labels": self.labels[indices]}


class ToyTask(Task):
    """Classification with a small network.

    Args:
        fancy: with batch normalisation and dropout, which have a state of their own.
        examples: size of the training split.
    """

    metric: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True
    sums: ClassVar[tuple[str, ...]] = ("loss", "correct", "count")

    def __init__(self, fancy: bool = True, examples: int = 96) -> None:
        self.fancy = fancy
        self.train = Points(examples, 1)
        self.test = Points(11, 2)

    def build_model(self) -> nn.Module:
        extra = [nn.BatchNorm1d(16), nn.Dropout(0.2)] if self.fancy else []
        return nn.Sequential(nn.Linear(FEATURES, 16), *extra, nn.ReLU(), nn.Linear(16, CLASSES))

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        weights = next(model.parameters())
        logits: Tensor = model(batch["points"].to(weights.device, weights.dtype))
        return logits

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(self._logits(model, batch), batch["labels"])

    def measure(self, model: nn.Module, batch: Batch) -> Tensor:
        logits, labels = self._logits(model, batch).double(), batch["labels"]
        loss = F.cross_entropy(logits, labels, reduction="sum")
        return torch.stack([loss, (logits.argmax(1) == labels).sum().double(), loss.new_tensor(len(labels))])

    def summarize(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {"loss": sums["loss"] / sums["count"], "accuracy": sums["correct"] / sums["count"]}


def settings(**changes: Any) -> Settings:
    values: dict[str, Any] = {
        "seed": 1,
        "epochs": 100,
        "max_steps": 6,
        "batch_size": 4,
        "eval_batch_size": 3,
        "accumulation": 1,
        "clip_norm": None,
        "precision": "fp64",
        "log_every": 1,
        "eval_every": 1,
        "eval_examples": None,
        "untimed_steps": 1,
        "checkpoint_every": None,
        "keep_checkpoints": 2,
        "check_every": 1,
        "elastic": False,
    }
    return Settings(**{**values, **changes})


def plan(
    method: Method, task: Task | None = None, lr: float = 0.1, lr_schedule: LrSchedule | None = None, **changes: Any
) -> Plan:
    return Plan(
        task=task or ToyTask(),
        method=method,
        optimizer=partial(torch.optim.SGD, lr=lr, momentum=0.9),
        lr_schedule=lr_schedule or Constant(),
        schedule=AfterBackward(),
        settings=settings(**changes),
    )


def simulated(workers: int) -> SimulatedCluster:
    return SimulatedCluster(workers, Network(alpha=1e-4, gbit=1), count_local=False)


def trainer(
    plan: Plan, folder: Path, workers: int = 4, checkpoint: Path | None = None, observers: Sequence[Observer] = ()
) -> Trainer:
    return Trainer(plan, simulated(workers), Run("0", folder, checkpoint), observers)


class Notebook(Observer):
    """Records the events that it receives."""

    def __init__(self) -> None:
        self.reported: list[tuple[Any, ...]] = []

    def begin(self, step: int, total: int) -> None:
        self.reported.append(("begin", step, total))

    def step(self, step: int) -> None:
        self.reported.append(("step", step))

    def metrics(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        self.reported.append((kind, step, dict(values)))

    def end(self, summary: Mapping[str, Any]) -> None:
        self.reported.append(("end",))

    def close(self) -> None:
        self.reported.append(("close",))

    def of(self, kind: str) -> list[tuple[int, dict[str, float]]]:
        return [(event[1], event[2]) for event in self.reported if event[0] == kind]


class Stopped(Exception):  # noqa: N818 - nothing went wrong
    """Ends a run in the middle."""


class Stopper(Observer):
    """Stops it when the step ``step`` is done."""

    def __init__(self, step: int) -> None:
        self._last = step

    def step(self, step: int) -> None:
        if step == self._last:
            raise Stopped
