"""A small model with all features that are difficult for a schedule, and the loop that trains it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spardl.clusters import Cluster
from spardl.method.method import Method
from spardl.schedules import Engine, Schedule, Training
from spardl.vector.flat import FlatGradient
from tests.support.harness import dense

Make: TypeAlias = Callable[[nn.Module], torch.optim.Optimizer]
WORDS, WIDTH = 11, 6


class Awkward(nn.Module):
    """A tied decoder, attention that uses another module's weights, an LSTM, and unused parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.unused = nn.Linear(3, 2)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.decoder = nn.Linear(WIDTH, WORDS)
        self.decoder.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        found = self.embedding(words)
        found = found + self.attention(found, found, found, need_weights=False)[0]
        return self.decoder(self.recurrent(found)[0] * self.scale)


def make_model() -> Awkward:
    torch.manual_seed(3)
    return Awkward().double()


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Matrices and vectors with different learning rates and decays, in another order than the model's."""
    split = {True: [], False: []}
    for parameter in model.parameters():
        split[parameter.ndim > 1].append(parameter)
    groups = [{"params": split[False], "lr": 0.03, "weight_decay": 0.0}, {"params": split[True]}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.02)


@dataclass(frozen=True)
class Setting:
    """Training settings that must give equal results with all schedules."""

    optimizer: Make = momentum
    clip_norm: float | None = None
    accumulation: int = 1
    steps: int = 20


SETTINGS = {
    "momentum": Setting(),
    "adamw": Setting(adamw),
    "two_groups": Setting(two_groups),
    "clipping": Setting(clip_norm=0.3),
    "accumulation": Setting(accumulation=4),
    "everything": Setting(two_groups, clip_norm=0.3, accumulation=4),
}


def batch(step: int, rank: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + number)
    return torch.randint(WORDS, (2, 5), generator=generator)


def loss_of(model: nn.Module, words: Tensor) -> Tensor:
    return F.cross_entropy(model(words).flatten(0, 1), words.roll(1, 1).flatten())


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def one_step(synchronizer: Engine, make_loss: Callable[[], Tensor]) -> None:
    """A step of a single local rank with one backward pass."""
    synchronizer.begin()
    loss = make_loss()
    synchronizer.before_backward(last=True)
    loss.backward()
    synchronizer.collect()
    synchronizer.finish()


class Loop:
    """A training loop with a schedule."""

    def __init__(
        self, schedule: Schedule, cluster: Cluster, setting: Setting | None = None, method: Method | None = None
    ) -> None:
        self.setting, self.cluster = setting or Setting(), cluster
        self.model = make_model()
        self.gradient = FlatGradient(self.model.named_parameters())
        self.optimizer = self.setting.optimizer(self.model)
        training = Training(self.model, self.gradient, self.optimizer, self.setting.clip_norm)
        self.synchronizer: Engine = schedule.start(method or dense(), cluster, training)

    def step(self, step: int) -> None:
        for local, rank in enumerate(self.cluster.local_ranks):
            self.synchronizer.begin(local)
            for number in range(self.setting.accumulation):
                with self.cluster.computing(local):
                    loss = loss_of(self.model, batch(step, rank, number)) / self.setting.accumulation
                    self.synchronizer.before_backward(last=number == self.setting.accumulation - 1)
                    loss.backward()
            self.synchronizer.collect()
        self.synchronizer.finish()

    def run(self, steps: Iterable[int] | None = None) -> Tensor:
        """The weights after the given steps; by default, all."""
        for step in range(self.setting.steps) if steps is None else steps:
            self.step(step)
        self.synchronizer.flush()
        return weights(self.model)

    def state(self) -> dict[str, Any]:
        locals_ = range(len(self.cluster.local_ranks))
        return {
            "synchronizer": [self.synchronizer.state_dict(local) for local in locals_],
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for local, values in enumerate(state["synchronizer"]):
            self.synchronizer.load_state_dict(local, values)
