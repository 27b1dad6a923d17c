"""``spardl profile``: how long the layers of a model take."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import torch
from torch import Tensor

from spardl.basics.errors import ConfigError
from spardl.clusters.profile import Profile
from spardl.diagnostics.jobs import SOURCES, Source, made
from spardl.diagnostics.timeline.measure import measure

__all__ = ["profile", "profile_command"]

# Small, so that random labels cannot drive the weights away while times are taken.
_LEARNING_RATE = 1e-5
_OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = MappingProxyType(
    {"sgd": partial(torch.optim.SGD, momentum=0.9), "adamw": torch.optim.AdamW}
)
_EXAMPLES = """\b
Examples:
  spardl profile training:make --out model.json
  spardl profile torchvision:resnet50 --batch 8 --out resnet50.json
\b
Here training.py is a file of yours, in this folder, with
  def make():
      return MyModel(), torch.randn(32, 3, 224, 224)
"""


@dataclass(frozen=True)
class _Options:
    """Of the command line."""

    model: str
    out: Path
    batch: int
    device: str
    threads: int | None
    cpu_seconds: bool
    optimizer: str
    size: int | None
    passes: int
    warmup: int
    seq: int = 64

    def check(self) -> None:
        """Accepts what makes sense.

        Raises:
            ConfigError: if it does not.
        """
        if self.cpu_seconds and (self.device != "cpu" or self.threads != 1):
            raise ConfigError(
                "--cpu-seconds adds up all threads, and knows no GPU; use it with --device cpu --threads 1"
            )
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("--device cuda: torch finds no GPU here; use --device cpu")
        if min(self.batch, self.seq, self.passes, self.size or 1, self.threads or 1) < 1 or self.warmup < 0:
            raise ConfigError("--batch, --size, --seq, --passes and --threads must be at least 1, and --warmup 0")


def _measured(options: _Options, sources: Mapping[str, Source]) -> Profile:
    torch.manual_seed(1)
    job = made(options.model, options, sources)
    model = job.model.to(options.device).train()
    data = _moved(job.data, options.device)
    optimizer = _OPTIMIZERS[options.optimizer](model.parameters(), lr=_LEARNING_RATE)
    return measure(
        model,
        lambda: job.loss(model, data),
        optimizer,
        name=options.model,
        batch=job.examples or options.batch,
        passes=options.passes,
        warmup=options.warmup,
        timer=time.process_time if options.cpu_seconds else time.perf_counter,
    )


def _moved(value: Any, device: str) -> Any:
    """Tensors within tuples, lists and mappings on another device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {name: _moved(part, device) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return [_moved(part, device) for part in value]
    return value


def profile_command(sources: Mapping[str, Source]) -> click.Command:
    """The command, for these libraries of models and for functions.

    Args:
        sources: by what stands in front of the colon.
    """
    libraries = ", ".join(f"{name}:NAME" for name in sources)

    @click.command("profile", epilog=_EXAMPLES)
    @click.argument("model")
    @click.option(
        "--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The JSON file to write."
    )
    @click.option("--batch", type=int, default=8, show_default=True, help="Examples in one pass of a library's model.")
    @click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
    @click.option("--threads", type=int, help="Of torch on the CPU [all cores].")
    @click.option("--cpu-seconds", is_flag=True, help="Count the CPU's own seconds, on busy machines.")
    @click.option("--optimizer", type=click.Choice(list(_OPTIMIZERS)), default="sgd", show_default=True)
    @click.option("--size", type=int, help="Side of a picture [the model's own].")
    @click.option("--passes", type=int, default=5, show_default=True, help="Steps that count.")
    @click.option("--warmup", type=int, default=2, show_default=True, help="Steps before them.")
    def command(**given: Any) -> None:
        options = _Options(**given)
        options.check()
        if options.threads:
            torch.set_num_threads(options.threads)
        found = _measured(options, sources)
        found.write(options.out)
        click.echo(
            f"{found.model} on {found.device}, batch {found.batch}: {len(found.layers)} layers, "
            f"{sum(found.entries):,} entries, forward {found.forward:.4g} s, backward {found.backward:.4g} s, "
            f"update {found.update * sum(found.entries):.4g} s"
        )

    command.help = (
        "Measure how long the layers of a model take.\n\nThe file is what advise and timeline read. MODEL is "
        "package.module:function, a function of yours that returns the model and a batch for it (or, instead of the "
        "batch, a function without arguments that makes a forward pass and returns the loss); or a model of a library "
        "with random pictures: "
        f"{libraries}. Times are medians over some training steps, with hooks at every layer."
    )
    return command


profile = profile_command(SOURCES)
