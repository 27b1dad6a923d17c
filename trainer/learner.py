"""One step of synchronous training: backward passes, synchronization, update."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from spardl.basics.checks import is_a
from spardl.basics.errors import ConfigError, SpardlError, first_line
from spardl.clusters.base import Cluster, gather_rows
from spardl.method.elastic import sources
from spardl.method.method import Method
from spardl.method.moving import check_moved
from spardl.protocol.programs import Worker
from spardl.schedules.engine import Schedule, Training
from spardl.schedules.plain import PlainSteps, decay_of
from spardl.vector.flat import FlatGradient
from trainer.lr import LrSchedule
from trainer.memory import Need
from trainer.sampler import Batches, LaneSampler, Sampler, ShuffledSampler, TrainingWorker, average_buffers
from trainer.task import Batch, Task

__all__ = [
    "PRECISIONS",
    "Learner",
    "LossScale",
    "Plan",
    "Precision",
    "Settings",
    "autocast",
    "evaluate",
    "evenly_spread",
    "sample_optimizer",
]


# A loss that is multiplied so that gradients in float16 neither vanish nor overflow.
#
# Source: Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2; how the factor changes is torch's.


class LossScale:
    """torch's ``GradScaler`` for averages that somebody else looks at: it is told whether they overflowed.

    Args:
        device: where losses are.
        enabled: whether losses are scaled at all.
    """

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self._scaler = GradScaler(device.type, enabled=enabled)
        # A scaler learns of an overflow from the gradients of an optimizer.
        self._probe = nn.Parameter(torch.zeros(1, device=device))
        self._optimizer = torch.optim.SGD([self._probe])
        self.enabled = enabled

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss, of shape (), times the factor; ``loss``: likewise."""
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def factor(self) -> float:
        """It, now."""
        return self._scaler.get_scale()

    def update(self, *, overflowed: bool) -> None:
        """Ends a step; ``overflowed``: whether its averages were left out."""
        if not self.enabled:
            return
        self._probe.grad = torch.full_like(self._probe, math.inf if overflowed else 0.0)
        self._scaler.unscale_(self._optimizer)
        self._scaler.update()

    def state_dict(self) -> dict[str, Any]:
        """The factor, and since when it has not changed; empty where losses are not scaled."""
        return self._scaler.state_dict()

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Continues from what ``state_dict`` gave, if it gave anything."""
        if values:
            self._scaler.load_state_dict(dict(values))


# How long and how to train: the ``training`` node of a configuration.


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


# Evaluation of a split, shared out between the workers.


def autocast(device: torch.device, formats: Precision) -> torch.autocast:
    """The context that matrix products run in."""
    return torch.autocast(device.type, dtype=formats.autocast, enabled=formats.autocast is not None)


def evaluate(
    task: Task,
    model: nn.Module,
    cluster: Cluster,
    workers: Sequence[TrainingWorker],
    settings: Settings,
) -> dict[str, float]:
    """Measures the test split, or an evenly spread part of it, with the workers' averaged running statistics.

    Every rank takes every P-th example, and the sums are added up in the order of the ranks, so a simulated
    cluster finds the same figures to the last bit.
    """
    average_buffers(cluster, workers, model)
    model.eval()
    chosen = evenly_spread(len(task.test), settings.eval_examples)
    with torch.no_grad():
        rows = [_measure(task, model, chosen[rank :: cluster.size], settings) for rank in cluster.local_ranks]
    model.train()
    total = torch.stack(gather_rows(cluster, rows)).sum(0)
    return task.summarize(dict(zip(task.sums, total.tolist(), strict=True)))


def evenly_spread(available: int, wanted: int | None) -> Tensor:
    """Positions in a split: all, or so many at equal distances, since neighbours are often alike.

    Args:
        available: examples of the split.
        wanted: how many at most; ``None``: all.

    Returns:
        int64, shape (count,), increasing.
    """
    count = available if wanted is None else min(wanted, available)
    return torch.arange(count) * available // max(1, count)


def _measure(task: Task, model: nn.Module, indices: Tensor, settings: Settings) -> Tensor:
    device = next(model.parameters()).device
    sums = torch.zeros(len(task.sums), dtype=torch.float64, device=device)
    for part in indices.split(settings.eval_batch_size) if indices.numel() else ():
        with autocast(device, settings.formats):
            sums += task.measure(model, task.test.batch(part, None))
    return sums


@dataclass(frozen=True)
class Plan:
    """Everything that is chosen before the workers start.

    Attributes:
        task: model, data, loss and metric.
        method: how gradients are averaged.
        optimizer: makes the optimizer from the parameters.
        lr_schedule: factor on the learning rate.
        schedule: when gradients are sent.
        settings: of the loop.
    """

    task: Task
    method: Method
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    lr_schedule: LrSchedule
    schedule: Schedule
    settings: Settings

    def check(self, workers: int) -> None:
        """Tries what can be tried before the workers start.

        Raises:
            ConfigError: if this cannot be trained by so many workers.
        """
        self.method.communicator.check_workers(workers)
        self.schedule.check(self.method, clips=self.settings.clip_norm is not None)
        if self.schedule.alone and self.settings.formats.scales:
            raise ConfigError(
                f"schedule={self.schedule.name} does not support loss scaling; use training.precision=bf16, or fp32"
            )
        self.sampler(Worker(0, workers))
        self._try_model()
        self._check_momentum()
        optimizer = sample_optimizer(self.optimizer)
        if self.method.momentum.moved:
            check_moved(self.method.momentum, optimizer)

    def _check_momentum(self) -> None:
        rule, given = self.method.momentum, getattr(self.optimizer, "keywords", {})
        kind = getattr(self.optimizer, "func", self.optimizer)
        if rule.moved:
            return
        if rule.remembers and "momentum" not in inspect.signature(kind).parameters:
            raise ConfigError(
                f"momentum={rule.name} replaces the momentum of the optimizer, but {kind.__name__} has none; "
                "use optimizer=sgd, or momentum=optimizer"
            )
        for key, applied in (("momentum", rule.remembers), ("weight_decay", rule.decay > 0)):
            if applied and given.get(key):
                raise ConfigError(
                    f"momentum={rule.name} applies {key} before compression, and optimizer.{key}={given[key]} would "
                    f"apply it again; use optimizer.{key}=0, or momentum=optimizer"
                )

    def need(self, workers: int) -> Need:
        """What a process of so many workers, ``workers``, needs of a machine's memory."""
        formats = self.settings.formats
        alone = self.schedule.alone
        return Need.of(self._try_model(), formats.weights, self.optimizer, self.method, workers, alone=alone)

    def _try_model(self) -> nn.Module:
        # Without memory for the weights. Has a second use, too: imports that all workers will find done.
        try:
            with torch.device("meta"):
                return self.task.build_model()
        except SpardlError:
            raise
        except Exception as error:
            raise ConfigError(f"model cannot be made: {type(error).__name__}: {first_line(error)}") from error

    def sampler(self, worker: Worker) -> Sampler:
        """A worker's share of the training data."""
        examples, settings = len(self.task.train), self.settings
        if self.task.consecutive:
            return LaneSampler(examples, worker, settings.batch_size, settings.accumulation, settings.seed)
        return ShuffledSampler(examples, worker, settings.batch_size * settings.accumulation, settings.seed)


def sample_optimizer(make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """An optimizer of one number, before there is a model.

    Args:
        make: makes it from parameters.

    Raises:
        ConfigError: if it cannot be made, or not be used.
    """
    _check_numbers(getattr(make, "keywords", {}))
    try:
        # Has a second use: torch's optimizers import a second's worth of modules, here once for all workers.
        return make([nn.Parameter(torch.zeros(1))])
    except Exception as error:
        given = ", ".join(f"{key}={value}" for key, value in getattr(make, "keywords", {}).items())
        raise ConfigError(
            f"optimizer cannot be made with {given}: {type(error).__name__}: {first_line(error)}"
        ) from error


def _check_numbers(given: Mapping[str, Any]) -> None:
    factor = given.get("momentum", 0)
    if is_a(float, factor) and not 0 <= factor < 1:
        raise ConfigError(
            f"optimizer.momentum must be at least 0 and below 1, got {factor!r}; old gradients would never decay"
        )
    for key, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"optimizer.{key} must be a finite number, got {value}")


class Learner:
    """A model, its optimizer and the local workers who train it.

    Args:
        plan: what to train and how.
        cluster: who trains.
        device: where the model lives.
        shift: steps that were done with other numbers of workers, beyond those that as many examples take now.
        planned: passes over the data that learning rates are made for; ``None``: those of the whole run.

    Attributes:
        model: its weights are equal on all workers.
        gradient: all its gradients, as one vector.
        synchronizer: averages them, and lets the optimizer use the averages.
        workers: the local ones.
        steps_per_epoch: steps in which every worker passes over its share of the data.
        total_steps: steps of the whole run.
        planned: passes over the data that learning rates are made for.
    """

    def __init__(
        self,
        plan: Plan,
        cluster: Cluster,
        device: torch.device,
        shift: int = 0,
        planned: float | None = None,
    ) -> None:
        self._shift = shift
        self._plan, self._cluster, self._device = plan, cluster, device
        self._settings = plan.settings
        torch.manual_seed(plan.settings.seed)
        self.model = plan.task.build_model().to(device, plan.settings.formats.weights)
        self.gradient = FlatGradient(self.model.named_parameters())
        self._optimizer = plan.optimizer(self.model.parameters())
        self._base_rates = [group["lr"] for group in self._optimizer.param_groups]
        self._scale = LossScale(device, enabled=plan.settings.formats.scales)
        factor = self._scale.factor if self._scale.enabled else None
        PlainSteps.of(plan.method.momentum, self._optimizer)
        training = Training(
            self.model,
            self.gradient,
            self._optimizer,
            plan.settings.clip_norm,
            factor,
            decay=decay_of(plan.method.momentum, self._optimizer),
        )
        self.synchronizer = plan.schedule.start(plan.method, cluster, training)
        self.workers = [
            TrainingWorker(worker, self.model, plan.sampler(worker), plan.settings.seed)
            for worker in cluster.local_workers
        ]
        self.steps_per_epoch = self.workers[0].sampler.steps_per_epoch
        self.total_steps = plan.settings.total_steps(self.steps_per_epoch, shift)
        self.planned = self.epochs(self.total_steps) if planned is None else planned
        self._batches = [
            Batches(plan.task.train, worker.sampler, plan.settings.batch_size, self.total_steps - shift)
            for worker in self.workers
        ]

    def step(self, step: int) -> list[float]:
        """Trains step number ``step``, counted from 0.

        Returns:
            The loss of each local worker.
        """
        for group, rate in zip(self._optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = rate * self._factor(step)
        losses = [self._backward(local, step) for local in range(len(self.workers))]
        self.synchronizer.finish()
        self._scale.update(overflowed=self.synchronizer.overflowed)
        return losses

    def _backward(self, local: int, step: int) -> float:
        worker = self.workers[local]
        with worker.active():
            batches, passes = self._batches[local].of(step - self._shift), self._settings.accumulation
            self.synchronizer.begin(local)
            losses = []
            for number in range(1, passes + 1):
                with self._cluster.computing(local):
                    losses.append(self._backward_part(next(batches), last=number == passes))
            if not math.isfinite(sum(losses)):
                worker.undo_spoiled_buffers()
        self.synchronizer.collect()
        return sum(losses)

    def _backward_part(self, batch: Batch, *, last: bool) -> float:
        with autocast(self._device, self._settings.formats):
            loss = self._plan.task.loss(self.model, batch) / self._settings.accumulation
        self.synchronizer.before_backward(last=last)
        self._scale.scaled(loss).backward()
        return loss.item()

    def _factor(self, step: int) -> float:
        return self._plan.lr_schedule.factor(min(self.epochs(step), self.planned), self.planned)

    def epochs(self, step: int) -> float:
        """Passes over the data after so many steps."""
        return (step - self._shift) / self.steps_per_epoch

    def ends_part(self, step: int, epochs: float) -> bool:
        """Whether so many epochs, rounded to whole steps and at least one, have just passed, for the n-th time."""
        return (step - self._shift) % max(1, round(epochs * self.steps_per_epoch)) == 0

    @property
    def rate(self) -> float:
        """The learning rate of the last step, of the first parameter group."""
        rate: float = self._optimizer.param_groups[0]["lr"]
        return rate

    def digest(self) -> Tensor:
        """A hash of all weights: int64, shape (4,)."""
        return digest([parameter.detach() for parameter in self.model.parameters()])

    def lasting(self, local: int) -> dict[str, Sequence[Tensor]]:
        """What lasts from step to step, by name, in any shapes; a number that is not finite would stay, or spread."""
        moments = [value for state in self._optimizer.state.values() for value in state.values()]
        return {
            "weights are": list(self.model.parameters()),
            "optimizer's state is": [value for value in moments if isinstance(value, Tensor)],
            "running statistics are": [self.workers[local].floating_buffers()],
            **self.synchronizer.lasting(local),
        }

    def shared_state(self) -> dict[str, Any]:
        """What is equal on all workers: weights, optimizer, and how the loss is scaled."""
        scale = {"loss_scale": self._scale.state_dict()} if self._scale.enabled else {}
        return {"model": self.model.state_dict(), "optimizer": self._optimizer.state_dict(), **scale}

    def worker_state(self, local: int) -> dict[str, Any]:
        """What is a local worker's own: residual and the like, buffers, random numbers, counts."""
        return {
            "synchronizer": self.synchronizer.state_dict(local),
            "worker": self.workers[local].state_dict(),
            "ledger": self._cluster.ledgers[local].state_dict(),
        }

    def load_shared_state(self, values: Mapping[str, Any]) -> None:
        """Continues from ``shared_state``."""
        self.model.load_state_dict(values["model"])
        self._optimizer.load_state_dict(values["optimizer"])
        self._scale.load_state_dict(values.get("loss_scale", {}))

    def adopt_worker_state(self, local: int, load: Callable[[int], Mapping[str, Any]], before: int) -> None:
        """Continues from what another number of workers saved.

        Args:
            local: which rank.
            load: ``worker_state`` of an old rank.
            before: how many workers there were.
        """
        worker = self._cluster.local_workers[local]
        parts = {rank: load(rank) for rank in sources(worker, before)}
        self.synchronizer.adopt(local, [part["synchronizer"] for part in parts.values()], before)
        own = parts[worker.rank % before]["worker"]
        if worker.rank < before:
            self.workers[local].load_state_dict(own)
        else:
            # Two workers with the same random numbers would drop the same entries out.
            self.workers[local].load_buffers(own)

    def load_worker_state(self, local: int, values: Mapping[str, Any]) -> None:
        """Continues from ``worker_state``."""
        self.synchronizer.load_state_dict(local, values["synchronizer"])
        self.workers[local].load_state_dict(values["worker"])
        self._cluster.ledgers[local].load_state_dict(values["ledger"])


def digest(tensors: Sequence[Tensor]) -> Tensor:
    """A hash of ``tensors`` of any shape, bit by bit: int64, shape (4,), on the device of the first one."""
    algorithm = hashlib.sha256()
    for tensor in tensors:
        algorithm.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    words = torch.frombuffer(bytearray(algorithm.digest()), dtype=torch.int64)
    return words.to(tensors[0].device)
