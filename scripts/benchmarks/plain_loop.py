"""The loop that benches train in: a model in DDP or bare, a step as everybody writes it, any way to average."""

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

__all__ = ["PlainLoop", "Turn", "bytes_sent", "of_all", "planned"]


class Turn(NamedTuple):
    """Some steps in a row of one worker.

    Attributes:
        seconds: of a step.
        sent: bytes in a step, as the interface counts them.
    """

    seconds: float
    sent: float


def _constant(step: int) -> float:
    return 1.0


@dataclass
class PlainLoop:
    """One way to average, with its own model, on one worker.

    Attributes:
        name: of the case.
        plan: model, data, optimizer.
        seed: of weights, order and dropout.
        worker: who this is.
        rate: what the learning rate is multiplied by in a step.
        losses: of this worker's batches, one for each step so far.
    """

    name: str
    plan: Plan
    seed: int
    worker: Worker
    rate: Callable[[int], float] = field(default=_constant, kw_only=True)
    losses: list[Tensor] = field(default_factory=list, kw_only=True)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.bare, settings = self.plan.task.build_model(), self.plan.settings
        self.optimizer = self.plan.optimizer(self.bare.parameters())
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self.model, self.handle = attached(self.name, self.bare, self.optimizer, settings.clip_norm)
        # Who counts steps makes them.
        self._stepping = self.handle if isinstance(self.handle, spardl.Outer) else self.optimizer
        # Where each worker's own gradient is clipped, averages are not.
        self._clip = None if moves_optimizer(self.name) else settings.clip_norm
        self.sampler = ShuffledSampler(len(self.plan.task.train), self.worker, settings.batch_size, self.seed)

    def step(self) -> None:
        """One step of training."""
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
        """In which DDP sends nothing, if nothing is to be sent."""
        if self.name == ALONE and isinstance(self.model, DistributedDataParallel):
            return self.model.no_sync()
        return nullcontext()

    def timed(self, steps: int) -> Turn:
        """Some steps, which all workers begin at once."""
        dist.barrier()
        sent, began = bytes_sent(), time.perf_counter()
        for _ in range(steps):
            self.step()
        seconds = time.perf_counter() - began
        dist.barrier()  # Who has all it waits for may still have bytes in its queue, which the kernel has not counted.
        return Turn(seconds / steps, (bytes_sent() - sent) / steps)

    def tested(self) -> dict[str, float]:
        """What the task says of the test split, or of a part of it, a share of which is looked at by each worker.

        Between two exchanges of local steps, each looks at its share with its own weights.
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
        """Bytes that this worker sent in a step by our own count, without headers; ``None`` for what is not ours."""
        if self.handle is None:
            return None
        stats = self.handle.stats()  # of local steps, a step of these is an exchange
        return stats.bytes_sent * stats.steps / len(self.losses)

    def close(self) -> None:
        """Gives back what this took of the process group."""
        if isinstance(self.handle, spardl.Outer):
            self.handle.close()
        elif self.handle is not None:
            self.handle.detach()


def bytes_sent() -> int:
    """What gloo's interface has sent so far, by the kernel's count; 0 if none is named, or the machine's inner one."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    lines = Path("/proc/net/dev").read_text().splitlines()
    counters = dict(line.strip().split(":", 1) for line in lines if ":" in line)
    return int(counters[name].split()[8]) if name in counters and name != "lo" else 0


def of_all(turns: Sequence[Turn]) -> list[Turn]:
    """The slowest worker's seconds and the workers' mean of bytes, of each turn."""
    mine = torch.tensor(turns, dtype=torch.float64)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    every = torch.stack(parts)
    return [Turn(*pair) for pair in zip(every[..., 0].amax(0).tolist(), every[..., 1].mean(0).tolist(), strict=True)]


def planned(words: str) -> Plan:
    """What train.py would train with these choices.

    Args:
        words: with commas between them.

    Raises:
        ConfigError: if it cannot, or if its examples have an order.
        DataError: if its data are not there.
    """
    with choices.composing():
        try:
            plain = choices.composed(*words.split(","))
        except HydraException as error:
            raise ConfigError(f"--train {words}: {str(error).splitlines()[0]}") from error
    plan = build_plan(plain, build_dataset(plain))
    if plan.task.consecutive:
        raise ConfigError(
            f"--train {words}: batches of this task are consecutive, this loop shuffles them; choose another task"
        )
    return plan
