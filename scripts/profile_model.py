"""Measures the computation times of a model's layers, and writes them as a profile: runs spardl profile.

python scripts/profile_model.py torchvision:resnet50 --batch 8 --out resnet50.json
python scripts/profile_model.py timm:inception_v4 --batch 4 --out inception_v4.json
python scripts/profile_model.py transformers:bert-base --batch 8 --seq 64 --out bert_base.json
python scripts/profile_model.py train:model=resnet20,dataset=digits --batch 16 --threads 1 --out resnet20.json

Besides the models of spardl profile, there are transformers:bert-base and bert-large, and train: with choices of
train.py, on its data.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType

import click
import torch
import torch.nn.functional as F
from hydra.errors import HydraException
from hydra.utils import instantiate
from torch import Tensor, nn

from scripts import choices
from spardl.basics.errors import ConfigError
from spardl.diagnostics.cli import run
from spardl.diagnostics.commands import profile
from spardl.diagnostics.commands.profile import Job, Sizes, profile_command
from tasks.models.bert import bert_for_pretraining
from trainer.build import KINDS

# Padded to a multiple of 8, as in DeAR's own benchmark.
BERT_VOCABULARY = 30528
BERT_SIZES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "bert-base": {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "intermediate_size": 3072},
        "bert-large": {"hidden_size": 1024, "num_layers": 24, "num_heads": 16, "intermediate_size": 4096},
    }
)


def from_transformers(name: str, sizes: Sizes) -> Job:
    """Returns BERT with its pre-training heads, on random tokens, all of which are to be predicted."""
    if name not in BERT_SIZES:
        raise ConfigError(f"transformers:{name} does not exist; choose one of {', '.join(BERT_SIZES)}")
    shape = (sizes.batch, sizes.seq)
    tokens = torch.randint(BERT_VOCABULARY, shape)
    data = {
        "input_ids": tokens,
        "token_type_ids": torch.zeros(shape, dtype=torch.int64),
        "attention_mask": torch.ones(shape, dtype=torch.int64),
        "places": torch.ones(shape, dtype=torch.bool),
        "next": torch.randint(2, shape[:1]),
    }
    model = bert_for_pretraining(BERT_VOCABULARY, sizes.seq, **BERT_SIZES[name])  # type: ignore[arg-type]
    return Job(model, data, _bert_loss)


def _bert_loss(model: nn.Module, data: Mapping[str, Tensor]) -> Tensor:
    """Returns the loss of all words, as in DeAR's benchmark, and of the pairs."""
    inputs = {name: tensor for name, tensor in data.items() if name != "next"}
    words, pairs = model(**inputs)
    return F.cross_entropy(words, data["input_ids"].flatten()) + F.cross_entropy(pairs, data["next"])


def from_train(words: str, sizes: Sizes) -> Job:
    """Returns the model that train.py would train with these choices."""
    with choices.composing():
        try:
            plain = choices.composed(*words.split(","))
            for part in ("model", "dataset", "task"):
                KINDS[part].check(part, plain[part])
            parts = {part: instantiate(plain[part], _convert_="all") for part in ("model", "dataset")}
            task = instantiate(plain["task"], **parts, _convert_="all")
        except HydraException as error:
            raise ConfigError(f"train.py cannot make {words}: {error.__cause__ or error}".splitlines()[0]) from error
    examples = torch.arange(sizes.batch) % len(task.train)
    return Job(task.build_model(), task.train.batch(examples, torch.Generator().manual_seed(1)), task.loss)


SOURCES: Mapping[str, profile.Source] = MappingProxyType(
    {**profile.SOURCES, "transformers": from_transformers, "train": from_train}
)


def main() -> int:
    """Measures the model of the command line, writes its profile, and returns the exit code."""
    command = profile_command(SOURCES)
    command.params.append(
        click.Option(["--seq"], type=click.IntRange(min=1), default=64, show_default=True, help="Tokens per text.")
    )
    return run(command, sys.argv[1:], "profile_model.py")


if __name__ == "__main__":
    sys.exit(main())
