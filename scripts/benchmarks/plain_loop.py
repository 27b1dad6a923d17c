"""Training loop of the benchmarks: a model with or without DDP, and any method of averaging."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from hydra.errors import HydraException
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import spardl
from scripts import choices
from scripts.benchmarks.ddp_hooks import ALONE, attached, moves_optimizer
from spardl.basics.errors import ConfigError
from spardl.protocol.programs import Worker, seeded_generator
from trainer.build import build_dataset, build_plan
from trainer.learner import Plan, evenly_spread
from trainer.sampler import ShuffledSampler


class Turn(NamedTuple):
    """Consecutive steps of one worker.

    Attributes:
        seconds: Time per step in seconds.
        sent: Bytes sent per step, as counted by the interface.
    """

    seconds: float
    sent: float


@dataclass
class PlainLoop:
    """One way to average with its own model on one worker.

    Attributes:
        name: Name of the case.
        plan: Model, data and optimizer.
        seed: Seed of weights, order and dropout.
        worker: Rank of this process and the world size.
        rate: Factor of the learning rate by step.
        losses: Losses of this worker's batches, one per step so far.
    """

    name: str
    plan: Plan
    seed: int
    worker: Worker
    rate: Callable[[int], float] = field(default=lambda step: 1.0, kw_only=True)
    losses: list[Tensor] = field(default_factory=list, kw_only=True)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.bare, settings = self.plan.task.build_model(), self.plan.settings
        self.optimizer = self.plan.optimizer(self.bare.parameters())
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self.model, self.handle = attached(self.name, self.bare, self.optimizer, settings.clip_norm)
        # Outer counts local steps in its own step(), which calls the optimizer.
        self._stepping = self.handle if isinstance(self.handle, spardl.Outer) else self.optimizer
        # If each worker clips its own gradient, the averaged update must not be clipped again.
        self._clip = None if moves_optimizer(self.name) else settings.clip_norm
        self.sampler = ShuffledSampler(len(self.plan.task.train), self.worker, settings.batch_size, self.seed)

    def step(self) -> None:
        """Trains one step."""
        number, task = len(self.losses), self.plan.task
        batch = task.train.batch(self.sampler.indices(number), self.sampler.generator(number))
        torch.set_rng_state(seeded_generator(self.seed, "step", number, self.worker.rank).get_state())
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * self.rate(number)
        self.optimizer.zero_grad()
        with self._quiet():
            loss = task.loss(self.model, batch)
            loss.backward()
        if self._clip is not None:
            nn.utils.clip_grad_norm_(self.bare.parameters(), self._clip)
        self._stepping.step()
        self.losses.append(loss.detach())

    def _quiet(self) -> AbstractContextManager[None]:
        """Returns the context without communication for the case that sends nothing."""
        if self.name == ALONE and isinstance(self.model, DistributedDataParallel):
            return self.model.no_sync()
        return nullcontext()

    def timed(self, steps: int) -> Turn:
        """Trains and times some steps, which all workers start together."""
        dist.barrier()
        sent, began = bytes_sent(), time.perf_counter()
        for _ in range(steps):
            self.step()
        seconds = time.perf_counter() - began
        # A worker that has received everything may still have queued bytes that the kernel has not counted.
        dist.barrier()
        return Turn(seconds / steps, (bytes_sent() - sent) / steps)

    def tested(self) -> dict[str, float]:
        """Metrics on the test split or a part of it, distributed over the workers.

        Between two exchanges of local steps, each worker evaluates its share with its own weights.
        """
        task, settings, model = self.plan.task, self.plan.settings, self.bare.eval()
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)
        mine = evenly_spread(len(task.test), settings.eval_examples)[self.worker.rank :: self.worker.size]
        sums = torch.zeros(len(task.sums), dtype=torch.float64)
        with torch.no_grad():
            for part in mine.split(settings.eval_batch_size) if len(mine) else ():
                sums += task.measure(model, task.test.batch(part, None))
        model.train()
        dist.all_reduce(sums)
        return task.summarize(dict(zip(task.sums, sums.tolist(), strict=True)))

    def counted(self) -> float | None:
        """Returns the bytes sent per step as counted by spardl, without headers; ``None`` without spardl."""
        if self.handle is None:
            return None
        stats = self.handle.stats()  # with local steps, one of these steps is an exchange
        return stats.bytes_sent * stats.steps / len(self.losses)

    def close(self) -> None:
        """Detaches from the process group."""
        if isinstance(self.handle, spardl.Outer):
            self.handle.close()
        elif self.handle is not None:
            self.handle.detach()


def bytes_sent() -> int:
    """Bytes that the interface of gloo has sent so far, as counted by the kernel; 0 for the loopback interface."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    lines = Path("/proc/net/dev").read_text().splitlines()
    counters = dict(line.strip().split(":", 1) for line in lines if ":" in line)
    return int(counters[name].split()[8]) if name in counters and name != "lo" else 0


def of_all(turns: Sequence[Turn]) -> list[Turn]:
    """Combines the turns of all workers: maximum of the seconds, mean of the bytes."""
    mine = torch.tensor(turns, dtype=torch.float64)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    every = torch.stack(parts)
    return [Turn(*pair) for pair in zip(every[..., 0].amax(0).tolist(), every[..., 1].mean(0).tolist(), strict=True)]


def planned(words: str) -> Plan:
    """Returns the plan of a training with comma-separated choices of train.py.

    Raises:
        ConfigError: If the choices are invalid, or the batches of the task are consecutive.
        DataError: If the data are missing.
    """
    with choices.composing():
        try:
            plain = choices.composed(*words.split(","))
        except HydraException as error:
            raise ConfigError(f"--train {words}: {str(error).splitlines()[0]}") from error
    plan = build_plan(plain, build_dataset(plain))
    if plan.task.consecutive:
        raise ConfigError(
            f"--train {words}: this task needs consecutive batches, but this loop shuffles them; choose another task"
        )
    return plan
