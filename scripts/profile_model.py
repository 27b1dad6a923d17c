"""Measures how long the layers of a model take, and writes the profile that the timeline model reads.

python scripts/profile_model.py torchvision:resnet50 --batch 8 --out resnet50.json
python scripts/profile_model.py timm:inception_v4 --batch 4 --out inception_v4.json
python scripts/profile_model.py transformers:bert-base --batch 8 --seq 64 --out bert_base.json
python scripts/profile_model.py train:model=resnet20,dataset=digits --batch 16 --threads 1 --out resnet20.json

Pictures and texts are random, with the size that the model is made for; ``train:`` takes choices of train.py, with its
data. Times are medians over some training steps, with hooks at every layer.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import choices
import torch
import torch.nn.functional as F
from hydra.errors import HydraException
from hydra.utils import instantiate
from torch import Tensor, nn

from spardl.basics.errors import ConfigError
from spardl.clusters.profile import Profile
from spardl.diagnostics.timeline.measure import measure
from tasks.models.bert import bert_for_pretraining
from train import KINDS

# Padded to a multiple of 8, as in DeAR's own benchmark.
BERT_VOCABULARY = 30528
CLASSES = 1000
# Small, so that random labels cannot drive the weights away while times are taken.
LEARNING_RATE = 1e-5
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = MappingProxyType(
    {"sgd": partial(torch.optim.SGD, momentum=0.9), "adamw": torch.optim.AdamW}
)
BERT_SIZES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "bert-base": {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "intermediate_size": 3072},
        "bert-large": {"hidden_size": 1024, "num_layers": 24, "num_heads": 16, "intermediate_size": 4096},
    }
)


class Job(NamedTuple):
    """What is measured.

    Attributes:
        model: on the CPU, with fresh weights.
        data: named tensors on the CPU.
        loss: of the model and the data, on the model's device.
    """

    model: nn.Module
    data: Mapping[str, Tensor]
    loss: Callable[[nn.Module, Mapping[str, Tensor]], Tensor]


def from_torchvision(name: str, arguments: argparse.Namespace) -> Job:
    """A model of torchvision, on square pictures."""
    from torchvision.models import get_model  # noqa: PLC0415 - takes seconds

    return _classifier(_made(get_model, name, weights=None), arguments.size or 224, arguments.batch)


def from_timm(name: str, arguments: argparse.Namespace) -> Job:
    """A model of timm, on square pictures of the size it was published with."""
    from timm import create_model  # noqa: PLC0415 - takes seconds

    model = _made(create_model, name, pretrained=False)
    return _classifier(model, arguments.size or model.default_cfg["input_size"][-1], arguments.batch)


def _made(builder: Callable[..., nn.Module], name: str, **options: object) -> nn.Module:
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


def from_transformers(name: str, arguments: argparse.Namespace) -> Job:
    """BERT with its pre-training heads, on random tokens, all of which are to be predicted."""
    if name not in BERT_SIZES:
        raise ConfigError(f"there is no transformers:{name}; choose one of {', '.join(BERT_SIZES)}")
    shape = (arguments.batch, arguments.seq)
    tokens = torch.randint(BERT_VOCABULARY, shape)
    data = {
        "input_ids": tokens,
        "token_type_ids": torch.zeros(shape, dtype=torch.int64),
        "attention_mask": torch.ones(shape, dtype=torch.int64),
        "places": torch.ones(shape, dtype=torch.bool),
        "next": torch.randint(2, shape[:1]),
    }
    model = bert_for_pretraining(BERT_VOCABULARY, arguments.seq, **BERT_SIZES[name])
    return Job(model, data, _bert_loss)


def _bert_loss(model: nn.Module, data: Mapping[str, Tensor]) -> Tensor:
    """Of all words, as DeAR's benchmark asks for them, and of the pairs."""
    inputs = {name: tensor for name, tensor in data.items() if name != "next"}
    words, pairs = model(**inputs)
    return F.cross_entropy(words, data["input_ids"].flatten()) + F.cross_entropy(pairs, data["next"])


def from_train(words: str, arguments: argparse.Namespace) -> Job:
    """What train.py would train with these choices."""
    with choices.composing():
        try:
            plain = choices.composed(*words.split(","))
            for part in ("model", "dataset", "task"):
                KINDS[part].check(part, plain[part])
            parts = {part: instantiate(plain[part], _convert_="all") for part in ("model", "dataset")}
            task = instantiate(plain["task"], **parts, _convert_="all")
        except HydraException as error:
            raise ConfigError(f"train.py cannot make {words}: {error.__cause__ or error}".splitlines()[0]) from error
    examples = torch.arange(arguments.batch) % len(task.train)
    return Job(task.build_model(), task.train.batch(examples, torch.Generator().manual_seed(1)), task.loss)


SOURCES: Mapping[str, Callable[[str, argparse.Namespace], Job]] = MappingProxyType(
    {
        "torchvision": from_torchvision,
        "timm": from_timm,
        "transformers": from_transformers,
        "train": from_train,
    }
)


def profile(arguments: argparse.Namespace) -> Profile:
    """Builds the model and measures it.

    Raises:
        ConfigError: if there is no such model or device.
    """
    source, _, name = arguments.model.partition(":")
    if source not in SOURCES or not name:
        raise ConfigError(f"MODEL must be SOURCE:NAME with one of {', '.join(SOURCES)}, got {arguments.model}")
    if arguments.cpu_seconds and (arguments.device != "cpu" or arguments.threads != 1):
        raise ConfigError("--cpu-seconds adds up all threads, and knows no GPU; use it with --device cpu --threads 1")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU here; use --device cpu")
    if min(arguments.batch, arguments.seq, arguments.passes) < 1:
        raise ConfigError("--batch, --seq and --passes must be at least 1")
    torch.manual_seed(1)
    try:
        job = SOURCES[source](name, arguments)
    except ImportError as error:
        raise ConfigError(f"{arguments.model} needs a package more ({error}): pip install {error.name}") from error
    model = job.model.to(arguments.device).train()
    data = {key: tensor.to(arguments.device) for key, tensor in job.data.items()}
    optimizer = OPTIMIZERS[arguments.optimizer](model.parameters(), lr=LEARNING_RATE)
    return measure(
        model,
        lambda: job.loss(model, data),
        optimizer,
        name=arguments.model,
        batch=arguments.batch,
        passes=arguments.passes,
        warmup=arguments.warmup,
        timer=time.process_time if arguments.cpu_seconds else time.perf_counter,
    )


def main() -> int:
    """Measures the model of the command line, and writes its profile.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help=f"SOURCE:NAME, with a source of {', '.join(SOURCES)}")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--batch", type=int, default=8, help="examples in one pass")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, help="of torch on the CPU; all cores where it is not given")
    parser.add_argument(
        "--cpu-seconds",
        action="store_true",
        help="count only the CPU's own seconds: with --threads 1, on a busy machine",
    )
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="sgd", help="whose update is timed")
    parser.add_argument("--size", type=int, help="side of a picture, where it is not the model's own")
    parser.add_argument("--seq", type=int, default=64, help="tokens of a text")
    parser.add_argument("--passes", type=int, default=5, help="steps that count")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    try:
        found = profile(arguments)
        found.write(arguments.out)
    except (ConfigError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(
        f"{found.model} on {found.device}, batch {found.batch}: {len(found.layers)} layers, {sum(found.entries):,} "
        f"entries, forward {found.forward:.4g} s, backward {found.backward:.4g} s, "
        f"update {found.update * sum(found.entries):.4g} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
