"""One step of synchronous training: backward passes, synchronization, update."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spardl.basics.checks import is_a
from spardl.basics.errors import ConfigError, SpardlError
from spardl.basics.messages import first_line
from spardl.clusters.base import Cluster
from spardl.method.elastic import sources
from spardl.method.method import Method
from spardl.method.moving import check_moved
from spardl.protocol.programs import Worker
from spardl.schedules.base import Schedule
from spardl.schedules.plain import PlainSteps, decay_of
from spardl.schedules.training import Training
from spardl.training.batches import Batches
from spardl.training.evaluation import autocast
from spardl.training.loss_scale import LossScale
from spardl.training.lr import LrSchedule
from spardl.training.memory import Need
from spardl.training.sampler import LaneSampler, Sampler, ShuffledSampler
from spardl.training.settings import Settings
from spardl.training.task import Batch, Task
from spardl.training.worker import TrainingWorker
from spardl.vector.flat import FlatGradient

__all__ = ["Learner", "Plan", "sample_optimizer"]


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
                f"schedule={self.schedule.name} does not scale losses; use training.precision=bf16, or fp32"
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
                f"momentum={rule.name} takes the place of the optimizer's own, which {kind.__name__} does not have; "
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
            f"optimizer.momentum must be at least 0 and below 1, got {factor!r}; old gradients would never fade"
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
