"""Tests what improves sparse training with Adam, with an ideal compressor: the top k of the sum of all workers.

python scripts/idealized.py                      all rows, some 15 minutes
python scripts/idealized.py --only quota --steps 100 --seeds 1 2

A small GPT on the reference that help() shows, 4 workers in one process, gradients clipped to a norm of 1, a linear
warm-up in a fifth of the steps, then a cosine. Each worker adds what it would send to a residual; the largest entries
of the sum of all residuals are sent, and leave them. No real method finds these: this is what one can hope for. Prints
a row for each seed and learning rate: the loss of validation, and the share of entries that was sent.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

from tasks.datasets.pydocs import load_pydocs_chars
from tasks.models.gpt import GptLanguageModel

WINDOW, BATCH, WORKERS = 64, 16, 4
DECAY, SQUARES, WEIGHT_DECAY, EPS = 0.98, 0.95, 0.01, 1e-8


@dataclass(frozen=True)
class Variant:
    """Local Adam update (second moment before compression) with a decaying residual, and optional changes.

    Attributes:
        rates: Learning rates to try.
        density: Share of the entries that is sent.
        decay: Share of the residual that is left in the next step.
        frozen_after: Steps after which the second moment stays as it is; ``None``: never.
        exempt: Whether vectors (norms and biases) are sent whole.
        quota: Whether each tensor sends its own share.
        inertia: Momentum of the average.
        raw: Whether gradients are carried and sent, chosen by the size of the update that they would make; then Adam
            sees their average.
    """

    rates: tuple[float, ...] = (0.02, 0.03)
    density: float = 0.01
    decay: float = DECAY
    frozen_after: int | None = None
    exempt: bool = False
    quota: bool = False
    inertia: float = 0.0
    raw: bool = False


VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "moved": Variant(),
        "no decay": Variant(decay=1.0),
        "exempt": Variant(exempt=True),
        "quota": Variant(quota=True),
        "frozen variance": Variant(frozen_after=80),
        "inertia 0.3": Variant(inertia=0.3),
        "inertia 0.6": Variant(inertia=0.6),
        "gradients, chosen by updates": Variant(raw=True, rates=(0.003, 0.01, 0.02)),
        "the same, no decay": Variant(raw=True, decay=1.0, rates=(0.003, 0.01)),
        "dense": Variant(density=1.0, raw=True, decay=1.0, rates=(0.003, 0.01)),
    }
)


class Workers:
    """Memory of all workers: residuals and second moments of the local gradients, each of shape (P, n)."""

    def __init__(self, variant: Variant, shapes: list[torch.Size]) -> None:
        self.variant = variant
        sizes = torch.tensor([shape.numel() for shape in shapes])
        self.borders = [0, *sizes.cumsum(0).tolist()]
        self.entries = self.borders[-1]
        self.exempt = torch.repeat_interleave(torch.tensor([len(shape) < 2 for shape in shapes]), sizes)
        self.residual, self.variance = torch.zeros(WORKERS, self.entries), torch.zeros(WORKERS, self.entries)
        self.first, self.second = torch.zeros(self.entries), torch.zeros(self.entries)

    def average(self, gradients: Tensor, step: int) -> tuple[Tensor, int]:
        """Computes the update of shape (n,) and the number of sent entries from gradients of shape (P, n).

        Steps are numbered from 1.
        """
        variant = self.variant
        if variant.frozen_after is None or step <= variant.frozen_after:
            self.variance.lerp_(gradients**2, 1 - SQUARES)
            self.correction = 1 - SQUARES**step
        roots = (self.variance / self.correction).sqrt() + EPS
        self.residual.mul_(variant.decay).add_(gradients if variant.raw else gradients / roots)
        total = self.residual.sum(0)
        sent = self.choice((self.residual / roots).sum(0).abs() if variant.raw else total.abs())
        average = torch.zeros_like(total)
        average[sent] = total[sent] / WORKERS
        self.residual[:, sent] = 0
        return (self.adam if variant.raw else self.coast)(average, step), len(sent)

    def choice(self, sizes: Tensor) -> Tensor:
        """Positions of the entries to send."""
        wanted = max(1, int(self.variant.density * self.entries))
        if self.variant.quota:
            parts = ((start, sizes[start:stop]) for start, stop in pairwise(self.borders))
            share = self.variant.density
            return torch.cat([part.topk(max(1, round(share * len(part)))).indices + start for start, part in parts])
        if self.variant.exempt:
            wanted += int(self.exempt.sum())
            sizes = sizes.masked_fill(self.exempt, math.inf)
        return sizes.topk(min(wanted, self.entries)).indices

    def coast(self, average: Tensor, step: int) -> Tensor:
        """Returns the average, with momentum."""
        self.first.mul_(self.variant.inertia).add_(average, alpha=1 - self.variant.inertia)
        return self.first

    def adam(self, average: Tensor, step: int) -> Tensor:
        """Returns Adam's update of an average of gradients, without a first moment."""
        self.second.lerp_(average**2, 1 - SQUARES)
        divisor: Tensor = (self.second / (1 - SQUARES**step)).sqrt() + EPS
        return average / divisor


def windows(text: Tensor, seed: int) -> Iterator[Tensor]:
    """Batches of random windows of one character more than the model sees."""
    draws = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - WINDOW, (BATCH, 1), generator=draws)
        yield text[starts + torch.arange(WINDOW + 1)]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def gradient_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Returns the clipped gradient of one worker, shape (n,)."""
    model.zero_grad()
    loss_of(model, batch).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def schedule(done: float) -> float:
    """Returns the factor of the learning rate when a share of the training is done."""
    return done / 0.2 if done < 0.2 else (1 + math.cos(math.pi * (done - 0.2) / 0.8)) / 2


def fit(variant: Variant, rate: float, seed: int, steps: int, width: int) -> tuple[float, float]:
    """Trains once; returns the loss of validation, and the share of the entries that was sent."""
    data = load_pydocs_chars()
    torch.manual_seed(seed)
    model = GptLanguageModel(data.vocab_size, WINDOW, hidden_size=width)
    parameters = list(model.parameters())
    workers = Workers(variant, [parameter.shape for parameter in parameters])
    batches = [windows(data.train.tokens.long(), WORKERS * seed + worker) for worker in range(WORKERS)]
    sent = 0
    for step in range(1, steps + 1):
        update, count = workers.average(torch.stack([gradient_of(model, next(each)) for each in batches]), step)
        sent += count
        now = rate * schedule(step / steps)
        with torch.no_grad():
            weights = parameters_to_vector(parameters)
            vector_to_parameters(weights * (1 - now * WEIGHT_DECAY) - now * update, parameters)
    return validation(model, data.test.tokens.long()), sent / steps / workers.entries


@torch.no_grad()
def validation(model: nn.Module, text: Tensor) -> float:
    """Returns the mean loss of all whole windows."""
    rows = text[: len(text) // (WINDOW + 1) * (WINDOW + 1)].view(-1, WINDOW + 1)
    model.eval()
    return sum(float(loss_of(model, part)) * len(part) for part in rows.split(64)) / len(rows)


def main() -> None:
    """Reads what to try on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME", help="names of rows"
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--width", type=int, default=64, help="width of the model, a multiple of 4")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| variant | lr | seed | loss | sent |\n|---|---|---|---|---|", flush=True)
    for name in arguments.only:
        for rate in VARIANTS[name].rates:
            for seed in arguments.seeds:
                loss, share = fit(VARIANTS[name], rate, seed, arguments.steps, arguments.width)
                print(f"| {name} | {rate:g} | {seed} | {loss:.4g} | {share:.2%} |", flush=True)


if __name__ == "__main__":
    main()
