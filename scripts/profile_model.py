"""Measures the computation times of a model's layers, and writes them as a profile: runs spardl profile.

python scripts/profile_model.py torchvision:resnet50 --batch 8 --out resnet50.json
python scripts/profile_model.py train:model=resnet20,dataset=digits --batch 16 --threads 1 --out resnet20.json

Besides the models of spardl profile, there is train: with choices of train.py, on its data.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType

import torch
from hydra.errors import HydraException
from hydra.utils import instantiate

from scripts import choices
from spardl.basics.errors import ConfigError
from spardl.diagnostics.cli import run
from spardl.diagnostics.commands import profile
from spardl.diagnostics.commands.profile import Job, Sizes, profile_command
from trainer.build import KINDS


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


SOURCES: Mapping[str, profile.Source] = MappingProxyType({**profile.SOURCES, "train": from_train})


def main() -> int:
    """Measures the model of the command line, writes its profile, and returns the exit code."""
    return run(profile_command(SOURCES), sys.argv[1:], "profile_model.py")


if __name__ == "__main__":
    sys.exit(main())
