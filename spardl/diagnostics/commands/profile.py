"""``spardl profile``: measures the computation times of the layers of a model."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spardl.basics.errors import ConfigError, SpardlError, first_line
from spardl.clusters.profile import Profile
from spardl.diagnostics.timeline.measure import measure

__all__ = ["SOURCES", "Job", "Sizes", "Source", "from_function", "make_job", "profile", "profile_command"]


# What can be profiled: a model of a library, or the model that a user's function returns, with a batch and a loss.


# Number of classes of a library model, as in ImageNet.
CLASSES = 1000


class Job(NamedTuple):
    """A model to profile, with its input and loss function.

    Attributes:
        model: Model on the CPU, with new weights.
        data: Inputs of the model on the CPU, such as named tensors of any shape.
        loss: Function of the model and the data that returns a scalar on the model's device.
        examples: Number of examples in the data; ``None`` if it is the batch size that the user requested.
    """

    model: nn.Module
    data: Mapping[str, Any]
    loss: Callable[[nn.Module, Mapping[str, Any]], Tensor]
    examples: int | None = None


class Sizes(Protocol):
    """Sizes of the input batch that is created for a model of a model library."""

    @property
    def batch(self) -> int:
        """Number of examples per pass."""

    @property
    def size(self) -> int | None:
        """Side of a square picture in pixels; ``None`` for the default of the model."""


Source: TypeAlias = Callable[[str, Sizes], Job]
"""Creates a job from the name of a model and the sizes."""


def from_torchvision(name: str, sizes: Sizes) -> Job:
    """Creates a job for a model of torchvision on square pictures."""
    from torchvision.models import get_model  # noqa: PLC0415 - takes seconds

    return _classifier(_built(get_model, name, weights=None), sizes.size or 224, sizes.batch)


def from_timm(name: str, sizes: Sizes) -> Job:
    """Creates a job for a model of timm on square images of its default input size."""
    from timm import create_model  # noqa: PLC0415 - takes seconds

    model: Any = _built(create_model, name, pretrained=False)
    return _classifier(model, sizes.size or model.default_cfg["input_size"][-1], sizes.batch)


SOURCES: Mapping[str, Source] = MappingProxyType({"torchvision": from_torchvision, "timm": from_timm})
"""Libraries of models, by the prefix in front of the colon."""


def make_job(model: str, sizes: Sizes, sources: Mapping[str, Source]) -> Job:
    """Creates the job for the model that the command line names.

    Args:
        model: Name of the model: ``SOURCE:NAME``, or ``package.module:function``.
        sizes: Sizes of the inputs.
        sources: For each prefix SOURCE, the function that creates a job for a model of this library.

    Raises:
        ConfigError: If the model does not exist, or a library is missing.
    """
    source, _, name = model.partition(":")
    if not name:
        known = ", ".join(f"{each}:NAME" for each in sources)
        raise ConfigError(f"MODEL must be package.module:function, {known}, got {model}")
    try:
        return sources[source](name, sizes) if source in sources else from_function(model)
    except ImportError as error:
        raise ConfigError(f"{model} needs a missing package ({error}); pip install {error.name}") from error


def from_function(place: str) -> Job:
    """Creates a job from a user's function, which returns a model and either a batch or a loss function.

    If the function returns a batch, the loss is the attribute ``loss`` of the model's output, as in models of
    transformers; if there is none, it is the mean of all outputs, because only the times of the passes matter. If the
    function returns a loss function, this loss function takes no arguments, runs a forward pass on the device of the
    model's parameters, and returns the loss.

    Args:
        place: Function as ``package.module:function``, importable from the working directory or installed.

    Raises:
        ConfigError: If the function is missing, raises an error, or returns something else.
        ImportError: If a package that it imports is missing.
    """
    function = _found(place)
    try:
        returned = function()
    except SpardlError:
        raise  # its message already is one line
    except Exception as error:
        raise ConfigError(f"{place} failed with {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(returned, Sequence) or len(returned) != 2 or not isinstance(returned[0], nn.Module):
        got = f"({', '.join(type(each).__name__ for each in returned)})" if isinstance(returned, tuple) else returned
        raise ConfigError(
            f"{place} must return a tuple (torch.nn.Module, batch) or (torch.nn.Module, loss function), got {got!r}"
        )
    model, batch = returned
    if callable(batch):
        return Job(model, {}, lambda model, data: batch())
    return Job(model, {"batch": batch}, lambda model, data: _loss(_output(model, data["batch"])), _examples(batch))


def _found(place: str) -> Callable[[], Any]:
    module, _, name = place.partition(":")
    if str(Path.cwd()) not in sys.path:  # a console script searches its own folder first, not the working directory
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists, but one of its imports is missing
        raise ConfigError(
            f"module {module} is neither in {Path.cwd()} nor installed; run the command in the folder of the module"
        ) from error
    except ImportError:
        raise
    except Exception as error:
        raise ConfigError(f"{module} cannot be imported: {type(error).__name__}: {first_line(error)}") from error
    function = getattr(found, name, None)
    if not callable(function):
        raise ConfigError(f"{module} has no function {name}; pass package.module:function")
    called: Callable[[], Any] = function
    return called


def _output(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _loss(output: Any) -> Tensor:
    # Models of transformers return a mapping with the loss, other libraries an object with an attribute.
    named = output if isinstance(output, Mapping) else vars(output) if hasattr(output, "__dict__") else {}
    own = named.get("loss")
    if isinstance(own, Tensor):
        return own
    # All outputs take part, so that the backward pass reaches all parameters.
    means = [tensor.float().mean() for tensor in _tensors(output) if tensor.requires_grad]
    if not means:
        raise ConfigError(
            f"the model returned {type(output).__name__} without a differentiable tensor; return the model and a loss "
            "function without arguments instead"
        )
    return torch.stack(means).sum()


def _tensors(value: Any) -> list[Tensor]:
    """Returns all tensors in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _examples(batch: Any) -> int | None:
    return next((len(tensor) for tensor in _tensors(batch) if tensor.ndim), None)


def _built(builder: Callable[..., nn.Module], name: str, **options: object) -> nn.Module:
    try:
        return builder(name, **options)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"{builder.__module__.split('.')[0]} has no model {name}: {error}") from error


def _classifier(model: nn.Module, size: int, batch: int) -> Job:
    images = torch.randn(batch, 3, size, size)
    labels = torch.randint(CLASSES, (batch,))
    return Job(
        model,
        {"images": images, "labels": labels},
        lambda model, data: F.cross_entropy(model(data["images"]), data["labels"]),
    )


# Small, so that the weights stay finite despite random labels.
_LEARNING_RATE = 1e-5
_OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = MappingProxyType(
    {"sgd": partial(torch.optim.SGD, momentum=0.9), "adamw": torch.optim.AdamW}
)
_EXAMPLES = """\b
Examples:
  spardl profile training:make --out model.json
  spardl profile torchvision:resnet50 --batch 8 --out resnet50.json
\b
Here training.py is a file in the working directory that contains
  def make():
      return MyModel(), torch.randn(32, 3, 224, 224)
"""


@dataclass(frozen=True)
class _Options:
    """Options of the command line."""

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
        """Checks that the options fit each other and this machine.

        Raises:
            ConfigError: If the options contradict each other, or there is no GPU for ``--device cuda``.
        """
        if self.cpu_seconds and (self.device != "cpu" or self.threads != 1):
            raise ConfigError(
                "--cpu-seconds adds up the time of all threads and ignores a GPU; add --device cpu --threads 1"
            )
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("--device cuda: torch finds no GPU; use --device cpu")


def _measured(options: _Options, sources: Mapping[str, Source]) -> Profile:
    # Times depend on the data where operations skip work, so the data is the same in every run.
    torch.manual_seed(1)
    job = make_job(options.model, options, sources)
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
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {name: _moved(part, device) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return [_moved(part, device) for part in value]
    return value


def profile_command(sources: Mapping[str, Source]) -> click.Command:
    """Builds the command ``profile`` for a set of model libraries.

    Args:
        sources: For each prefix SOURCE, the function that creates a job for a model of this library.
    """
    libraries = ", ".join(f"{name}:NAME" for name in sources)

    @click.command("profile", epilog=_EXAMPLES)
    @click.argument("model")
    @click.option(
        "--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The JSON file to write."
    )
    @click.option(
        "--batch",
        type=click.IntRange(min=1),
        default=8,
        show_default=True,
        help="Examples per pass of a library model.",
    )
    @click.option(
        "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Device of the model."
    )
    @click.option("--threads", type=click.IntRange(min=1), help="CPU threads of torch [all cores].")
    @click.option("--cpu-seconds", is_flag=True, help="Measure CPU time instead of wall-clock time, for busy machines.")
    @click.option(
        "--optimizer",
        type=click.Choice(list(_OPTIMIZERS)),
        default="sgd",
        show_default=True,
        help="Optimizer of the steps.",
    )
    @click.option("--size", type=click.IntRange(min=1), help="Side of a picture in pixels [default of the model].")
    @click.option("--passes", type=click.IntRange(min=1), default=5, show_default=True, help="Measured steps.")
    @click.option(
        "--warmup", type=click.IntRange(min=0), default=2, show_default=True, help="Steps before the measurement."
    )
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
        "Measure how long the layers of a model take.\n\nWrites the file that advise and timeline read. MODEL is "
        "package.module:function, a function that returns your model and a batch (or, instead of the batch, a "
        "function without arguments that runs a forward pass and returns the loss); or a library model with random "
        f"pictures: {libraries}. Times are medians over several training steps, measured by hooks at every layer."
    )
    return command


profile = profile_command(SOURCES)
