"""Settings and plan of a training run, and the learner that performs its steps."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from spardl.basics.checks import is_number
from spardl.basics.errors import ConfigError, SpardlError, first_line
from spardl.clusters.base import Cluster, gather_rows
from spardl.method.elastic import sources
from spardl.method.method import Method
from spardl.method.moving import check_local_update, matrices_of
from spardl.method.registry import check_loss_scale
from spardl.protocol.programs import Worker
from spardl.schedules.apply_update import ApplyUpdate, decay_of, step_size_of
from spardl.schedules.engine import Schedule, Training
from spardl.vector.flat import FlatGradient
from trainer.early_stopping import EarlyStopping
from trainer.lr import LrSchedule
from trainer.memory import Need
from trainer.optimizers import OptimizerFactory, make_optimizer, optimizer_parts, takes_model
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


class LossScale:
    """Loss scaling for float16, based on torch's ``GradScaler``.

    After each step, the caller reports to ``update`` whether the averaged gradients overflowed.

    Source: Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2.

    Args:
        device: Device of the losses.
        enabled: Whether to scale losses.
    """

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self._scaler = GradScaler(device.type, enabled=enabled)
        # GradScaler only detects an overflow in the gradients of an optimizer.
        self._probe = nn.Parameter(torch.zeros(1, device=device))
        self._optimizer = torch.optim.SGD([self._probe])
        self.enabled = enabled

    def scaled(self, loss: Tensor) -> Tensor:
        """Returns the scalar ``loss`` multiplied by the current loss scale."""
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def factor(self) -> float:
        """Returns the current loss scale."""
        return self._scaler.get_scale()

    def update(self, *, overflowed: bool) -> None:
        """Updates the loss scale after a step; ``overflowed`` states whether gradients overflowed."""
        if not self.enabled:
            return
        # Shows the scaler the outcome through the gradient of the probe.
        self._probe.grad = torch.full_like(self._probe, math.inf if overflowed else 0.0)
        self._scaler.unscale_(self._optimizer)
        self._scaler.update()

    def state_dict(self) -> dict[str, Any]:
        """Returns the loss scale and the number of steps since its last change; empty if disabled."""
        return self._scaler.state_dict()

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Restores the result of ``state_dict``; an empty mapping changes nothing."""
        if values:
            self._scaler.load_state_dict(dict(values))


@dataclass(frozen=True)
class Precision:
    """Number formats of a run.

    Attributes:
        weights: Dtype of parameters, gradients and residuals.
        autocast: Dtype of matrix products; ``None`` for the dtype of the weights.
    """

    weights: torch.dtype
    autocast: torch.dtype | None = None

    @property
    def scales(self) -> bool:
        """Whether losses are scaled: true for float16, in which small gradients would become zero."""
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
    """Settings of the training loop: the ``training`` node of a configuration.

    Args:
        seed: Seed of initial weights, data order, augmentation and dropout.
        epochs: Number of passes over the data; may be a fraction.
        max_steps: Maximum number of steps; ``None`` for no limit.
        batch_size: Number of examples per worker in one backward pass.
        eval_batch_size: Number of examples per worker in one evaluation pass.
        accumulation: Number of backward passes per step, each with another batch.
        clip_norm: Maximum 2-norm of the averaged gradient; with local updates or independent optimizers, of each
            worker's own gradient. ``None`` for no clipping.
        precision: Number format: fp32, fp64, bf16 or fp16. The last two are formats of matrix products only (autocast),
            and weights stay in float32; fp16 also scales losses.
        log_every: Number of steps from one record of metrics to the next.
        eval_every: Number of epochs from one evaluation to the next; the last step is always evaluated.
        eval_examples: Number of test examples per evaluation, evenly spaced; ``None`` for all.
        untimed_steps: Number of steps after each start or resume that do not count for the samples per second.
        checkpoint_every: Number of steps from one checkpoint to the next; ``None`` for one per epoch.
        keep_checkpoints: Number of checkpoints to keep.
        check_every: Number of steps after which the averaged gradients of all workers are compared; they must be equal.
        elastic: Whether the world size may change when the run resumes.
        early_stopping: Settings that define when to end the run before its last step.
        profile: Whether rank 0 writes a trace of a few steps into the run folder.

    Raises:
        ConfigError: If a value is out of range.
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
    early_stopping: EarlyStopping = field(default_factory=EarlyStopping)
    profile: bool = False

    def __post_init__(self) -> None:
        self._demand("seed", is_number(int, self.seed), "an integer")
        self._demand("seed", -(2**63) <= self.seed < 2**64, "from -2^63 to 2^64 - 1")
        untimed = is_number(int, self.untimed_steps) and self.untimed_steps >= 0
        self._demand("untimed_steps", untimed, "an integer, at least 0")
        for name in ("batch_size", "eval_batch_size", "accumulation", "log_every", "keep_checkpoints", "check_every"):
            self._demand(name, self._counts(name), "an integer, at least 1")
        for name in ("max_steps", "checkpoint_every", "eval_examples"):
            self._demand(name, getattr(self, name) is None or self._counts(name), "an integer, at least 1, or null")
        for name in ("epochs", "eval_every"):
            self._demand(name, self._positive(name), "a number above 0")
        self._demand("clip_norm", self.clip_norm is None or self._positive("clip_norm"), "a number above 0, or null")
        for name in ("elastic", "profile"):
            self._demand(name, isinstance(getattr(self, name), bool), "true or false")
        self._demand("precision", self.precision in PRECISIONS, f"one of {', '.join(PRECISIONS)}")

    def _counts(self, name: str) -> bool:
        return is_number(int, getattr(self, name)) and getattr(self, name) >= 1

    def _positive(self, name: str) -> bool:
        return is_number(float, getattr(self, name)) and 0 < getattr(self, name) < math.inf

    def _demand(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise ConfigError(f"training.{name} must be {wanted}, got {getattr(self, name)!r}")

    @property
    def formats(self) -> Precision:
        """The dtypes that ``precision`` stands for."""
        return PRECISIONS[self.precision]

    def total_steps(self, steps_per_epoch: int, shift: int = 0) -> int:
        """Returns the number of steps of the whole run.

        Args:
            steps_per_epoch: Number of steps per epoch at the current world size.
            shift: Number of steps done at earlier world sizes, minus the number of steps for the same examples now.
        """
        steps = max(1, round(self.epochs * steps_per_epoch) + shift)
        return steps if self.max_steps is None else min(steps, self.max_steps)


def autocast(device: torch.device, formats: Precision) -> torch.autocast:
    """Returns a context manager that applies the autocast dtype of ``formats``, if it has one, on a device."""
    return torch.autocast(device.type, dtype=formats.autocast, enabled=formats.autocast is not None)


def evaluate(
    task: Task,
    model: nn.Module,
    cluster: Cluster,
    workers: Sequence[TrainingWorker],
    settings: Settings,
) -> dict[str, float]:
    """Evaluates the test split, or an evenly spaced part of it, and returns the metrics by name.

    All workers must call it together. The model uses the mean of all workers' running statistics. Each of P ranks takes
    every P-th example, and the sums are added in the order of the ranks, so that a simulated cluster computes bitwise
    identical metrics.
    """
    # All workers must evaluate the same model, and running statistics differ between them.
    average_buffers(cluster, workers, model)
    model.eval()
    chosen = evenly_spread(len(task.test), settings.eval_examples)
    with torch.no_grad():
        rows = [_measure(task, model, chosen[rank :: cluster.size], settings) for rank in cluster.local_ranks]
    model.train()
    total = torch.stack(gather_rows(cluster, rows)).sum(0)
    return task.summarize(dict(zip(task.sums, total.tolist(), strict=True)))


def evenly_spread(available: int, wanted: int | None) -> Tensor:
    """Selects positions of a split at equal distances, since adjacent examples are often similar.

    Args:
        available: Number of examples in the split.
        wanted: Maximum number of positions; ``None`` for all.

    Returns:
        int64, shape (count,), increasing.
    """
    count = available if wanted is None else min(wanted, available)
    return torch.arange(count) * available // max(1, count)


def _measure(task: Task, model: nn.Module, indices: Tensor, settings: Settings) -> Tensor:
    device = next(model.parameters()).device
    # A rank without examples still takes part in the sum.
    sums = torch.zeros(len(task.sums), dtype=torch.float64, device=device)
    for part in indices.split(settings.eval_batch_size) if indices.numel() else ():
        with autocast(device, settings.formats):
            sums += task.measure(model, task.test.batch(part, None))
    return sums


@dataclass(frozen=True)
class Plan:
    """Plan of a training run: the parts that a configuration chooses.

    Attributes:
        task: Model, data, loss and metric.
        method: Method that averages the gradients.
        optimizer: Function that builds the optimizer; see :func:`trainer.optimizers.make_optimizer`.
        lr_schedule: Schedule of the learning rate.
        schedule: Communication schedule of the gradients.
        settings: Settings of the training loop.
    """

    task: Task
    method: Method
    optimizer: OptimizerFactory
    lr_schedule: LrSchedule
    schedule: Schedule
    settings: Settings

    def check(self, workers: int) -> None:
        """Checks the plan as far as possible before the workers start.

        Args:
            workers: Number of workers.

        Raises:
            ConfigError: If the parts cannot be combined, or do not support this number of workers.
        """
        self.method.communicator.check_workers(workers)
        self.settings.early_stopping.check(self.task)
        self.schedule.check(self.method, clips=self.settings.clip_norm is not None)
        if self.schedule.alone and self.settings.formats.scales:
            raise ConfigError(
                f"schedule={self.schedule.name} does not support loss scaling; use training.precision=bf16, or fp32"
            )
        if self.settings.formats.scales:
            check_loss_scale(self.method.compressor, "use training.precision=bf16 or fp32, or compressor=topk")
        # Raises if there are too few examples.
        self.sampler(Worker(0, workers))
        model = self._try_model()
        # First, since such rules set optimizer.momentum=0, which other optimizers than SGD do not take.
        self._check_momentum()
        optimizer = sample_optimizer(self.optimizer)
        if takes_model(self.optimizer):
            make_optimizer(self.optimizer, model)
        if self.method.momentum.moved:
            for part in optimizer_parts(optimizer):
                check_local_update(self.method.momentum, part)

    def _check_momentum(self) -> None:
        rule, given = self.method.momentum, getattr(self.optimizer, "keywords", {})
        kind = getattr(self.optimizer, "func", self.optimizer)
        # check_moved compares these rules with the optimizer.
        if rule.moved:
            return
        known = inspect.signature(kind).parameters
        if rule.remembers and ("momentum" not in known or "betas" in known):
            raise ConfigError(
                f"momentum={rule.name} replaces the momentum of SGD, but {kind.__name__} has other moments or none; "
                "use optimizer=sgd, or momentum=optimizer"
            )
        for key, applied in (("momentum", rule.remembers), ("weight_decay", rule.decay > 0)):
            if applied and given.get(key):
                raise ConfigError(
                    f"momentum={rule.name} applies {key} before compression, and optimizer.{key}={given[key]} would "
                    f"apply it again; use optimizer.{key}=0, or momentum=optimizer"
                )

    def need(self, workers: int) -> Need:
        """Computes the memory that a process with ``workers`` workers needs."""
        formats = self.settings.formats
        alone = self.schedule.alone
        return Need.of(self._try_model(), formats.weights, self.optimizer, self.method, workers, alone=alone)

    def parameters(self) -> int:
        """Returns the number of parameters of the model, without allocating them if the model permits it."""
        return sum(parameter.numel() for parameter in self._try_model().parameters())

    def _try_model(self) -> nn.Module:
        # The meta device allocates no weights. The call also performs the model's imports once, before workers fork.
        try:
            with torch.device("meta"):
                return self.task.build_model()
        except SpardlError:
            raise
        except Exception:
            # On that device, a model can neither read a value nor load pretrained weights.
            return self._allocated_model()

    def _allocated_model(self) -> nn.Module:
        try:
            with torch.random.fork_rng(devices=[]):
                return self.task.build_model()
        except SpardlError:
            raise
        except Exception as error:
            raise ConfigError(f"model cannot be created: {type(error).__name__}: {first_line(error)}") from error

    def sampler(self, worker: Worker) -> Sampler:
        """Builds the sampler of a worker's share of the training data."""
        examples, settings = len(self.task.train), self.settings
        if self.task.consecutive:
            return LaneSampler(examples, worker, settings.batch_size, settings.accumulation, settings.seed)
        return ShuffledSampler(examples, worker, settings.batch_size * settings.accumulation, settings.seed)


def sample_optimizer(make: OptimizerFactory) -> torch.optim.Optimizer:
    """Builds an optimizer of tiny parameters, in order to check its settings before the model is built.

    Args:
        make: Function that builds the optimizer from parameters.

    Returns:
        Optimizer of a vector with one entry; if it treats matrices differently, also of a 1x1 matrix.

    Raises:
        ConfigError: If the optimizer cannot be built, or a setting is out of range.
    """
    _check_numbers(getattr(make, "keywords", {}))
    try:
        # torch's optimizers import further modules for about a second: once here instead of in each worker.
        vector, matrix = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, 1))
        return make([vector, matrix] if takes_model(make) else [vector])
    except SpardlError:
        raise
    except Exception as error:
        given = ", ".join(f"{key}={value}" for key, value in getattr(make, "keywords", {}).items())
        raise ConfigError(
            f"optimizer cannot be created with {given}: {type(error).__name__}: {first_line(error)}"
        ) from error


def _check_numbers(given: Mapping[str, Any]) -> None:
    factor = given.get("momentum", 0)
    if is_number(float, factor) and not 0 <= factor < 1:
        raise ConfigError(
            f"optimizer.momentum must be at least 0 and below 1, got {factor!r}; old gradients would never decay"
        )
    for key, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"optimizer.{key} must be a finite number, got {value}")


class Learner:
    """Performs training steps: the model, its optimizer and the local workers.

    Args:
        plan: Plan of the training: task, method, optimizer and schedules.
        cluster: Workers that train together.
        device: Device of the model.
        shift: Number of steps done at earlier world sizes, minus the number of steps for the same examples now.
        planned: Length of the learning-rate schedule in epochs; ``None`` for the length of the run.

    Attributes:
        model: Model whose weights are equal on all workers.
        gradient: All gradients of the model as one vector.
        synchronizer: Engine that averages the gradients and applies the averages.
        workers: Training state of each local worker.
        steps_per_epoch: Number of steps per epoch.
        total_steps: Number of steps of the whole run.
        planned: Length of the learning-rate schedule in epochs.
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
        # Equal seeds give all workers equal initial weights without communication.
        torch.manual_seed(plan.settings.seed)
        self.model = plan.task.build_model().to(device, plan.settings.formats.weights)
        self.gradient = FlatGradient(self.model.named_parameters())
        self._optimizer = make_optimizer(plan.optimizer, self.model)
        parts = optimizer_parts(self._optimizer)
        self._base_rates = [group["lr"] for group in self._optimizer.param_groups]
        self._scale = LossScale(device, enabled=plan.settings.formats.scales)
        factor = self._scale.factor if self._scale.enabled else None
        for part in parts:
            ApplyUpdate.of(plan.method.momentum, part)
        training = Training(
            self.model,
            self.gradient,
            self._optimizer,
            plan.settings.clip_norm,
            factor,
            decay=decay_of(plan.method.momentum, parts),
            matrices=matrices_of(parts) if plan.method.momentum.moved else (),
            step_size=step_size_of(plan.method.momentum, parts),
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
        """Performs one training step.

        Args:
            step: Number of steps done before this one.

        Returns:
            Mean training loss of each local worker in this step.
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
            # Running statistics with a NaN would never recover.
            if not math.isfinite(sum(losses)):
                worker.undo_spoiled_buffers()
        self.synchronizer.collect()
        return sum(losses)

    def _backward_part(self, batch: Batch, *, last: bool) -> float:
        with autocast(self._device, self._settings.formats):
            # Gradients accumulate as sums, and a step needs their mean.
            loss = self._plan.task.loss(self.model, batch) / self._settings.accumulation
        self.synchronizer.before_backward(last=last)
        self._scale.scaled(loss).backward()
        return loss.item()

    def _factor(self, step: int) -> float:
        # After a change of the world size, the last step may lie beyond the planned end.
        return self._plan.lr_schedule.factor(min(self.epochs(step), self.planned), self.planned)

    def epochs(self, step: int) -> float:
        """Returns the number of epochs completed after ``step`` steps; may be a fraction."""
        return (step - self._shift) / self.steps_per_epoch

    def ends_interval(self, step: int, epochs: float) -> bool:
        """Returns whether ``step`` is the end of an interval of ``epochs`` epochs, but of at least one step."""
        return (step - self._shift) % max(1, round(epochs * self.steps_per_epoch)) == 0

    @property
    def rate(self) -> float:
        """Learning rate of the first parameter group in the last step."""
        rate: float = self._optimizer.param_groups[0]["lr"]
        return rate

    def digest(self) -> Tensor:
        """Returns a hash of all weights, by which workers can compare their weights: int64, shape (4,)."""
        return digest([parameter.detach() for parameter in self.model.parameters()])

    def local_tensors(self, local: int) -> dict[str, Sequence[Tensor]]:
        """Returns the tensors of a local worker that persist between steps, to be checked for non-finite values.

        Their names are the beginnings of error messages, such as ``weights are``.
        """
        moments = [value for state in self._optimizer.state.values() for value in state.values()]
        return {
            "weights are": list(self.model.parameters()),
            "optimizer's state is": [value for value in moments if isinstance(value, Tensor)],
            "running statistics are": [self.workers[local].floating_buffers()],
            **self.synchronizer.local_tensors(local),
        }

    def shared_state(self) -> dict[str, Any]:
        """Returns the state that is equal on all workers: weights, optimizer and loss scale."""
        scale = {"loss_scale": self._scale.state_dict()} if self._scale.enabled else {}
        return {"model": self.model.state_dict(), "optimizer": self._optimizer.state_dict(), **scale}

    def worker_state(self, local: int) -> dict[str, Any]:
        """Returns the state of one local worker: residual, buffers, random state, and counts of time and bytes."""
        return {
            "synchronizer": self.synchronizer.state_dict(local),
            "worker": self.workers[local].state_dict(),
            "ledger": self._cluster.ledgers[local].state_dict(),
        }

    def load_shared_state(self, values: Mapping[str, Any]) -> None:
        """Restores the result of ``shared_state``."""
        self.model.load_state_dict(values["model"])
        self._optimizer.load_state_dict(values["optimizer"])
        self._scale.load_state_dict(values.get("loss_scale", {}))

    def adopt_worker_state(self, local: int, load: Callable[[int], Mapping[str, Any]], before: int) -> None:
        """Restores the state of a local worker from a checkpoint of another world size.

        Args:
            local: Index of the local worker.
            load: Function that returns the ``worker_state`` that a given rank saved in the checkpoint.
            before: World size of the checkpoint.
        """
        worker = self._cluster.local_workers[local]
        parts = {rank: load(rank) for rank in sources(worker, before)}
        self.synchronizer.adopt(local, [part["synchronizer"] for part in parts.values()], before)
        own = parts[worker.rank % before]["worker"]
        # Ranks that exist in both keep their random state.
        if worker.rank < before:
            self.workers[local].load_state_dict(own)
        else:
            # Two workers with equal random states would apply the same dropout masks.
            self.workers[local].load_buffers(own)

    def load_worker_state(self, local: int, values: Mapping[str, Any]) -> None:
        """Restores the result of ``worker_state``."""
        self.synchronizer.load_state_dict(local, values["synchronizer"])
        self.workers[local].load_state_dict(values["worker"])
        self._cluster.ledgers[local].load_state_dict(values["ledger"])


def digest(tensors: Sequence[Tensor]) -> Tensor:
    """Returns a hash of the bits of ``tensors``: int64, shape (4,), on the device of the first tensor."""
    algorithm = hashlib.sha256()
    for tensor in tensors:
        algorithm.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    words = torch.frombuffer(bytearray(algorithm.digest()), dtype=torch.int64)
    return words.to(tensors[0].device)
