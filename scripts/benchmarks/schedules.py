"""Times that the predictions of schedules assume for a GPU, and the profiles that are stretched to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from spardl.clusters.profile import Profile
from spardl.schedules.fusion import Linear

PROFILES = Path(__file__).resolve().parents[1] / "profiles"
WORKERS = 64
NETWORKS = ("ethernet_10g", "infiniband_100g")
FUSED = ("spardl", "topka", "count_sketch")
NOTHING = Linear(0.0, 0.0)


class Assumed(NamedTuple):
    """Assumed pass times of one model on a GPU.

    Attributes:
        seconds: Time of forward and backward pass together in seconds.
        batch: Number of examples per pass.
        certainty: Source of the value and its reliability.
    """

    seconds: float
    batch: int
    certainty: str


# An RTX 2080 Ti in float32 with the batches of DeAR's benchmark. NOT measured: this GPU was not available.
ASSUMED: Mapping[str, Assumed] = MappingProxyType(
    {
        "resnet50": Assumed(0.22, 64, "from memory: about 290 pictures/s; medium"),
        "densenet201": Assumed(0.27, 32, "from memory: about 120 pictures/s; low"),
        "inception_v4": Assumed(0.60, 64, "three times the products of ResNet-50; low"),
        "bert_base": Assumed(0.27, 64, "6 x 110 M x 64 x 64 products and sums at 10 TFLOP/s; low"),
        "bert_large": Assumed(0.42, 32, "6 x 336 M x 32 x 64 products and sums at 10 TFLOP/s; low"),
    }
)
# Five memory accesses per entry (SGD with momentum) at 616 GB/s, plus kernel launches; medium certainty.
ASSUMED_UPDATE = 5e-11
# By method: several hundred kernel launches for 64 selections, and 15 memory accesses per entry at 616 GB/s; a sketch
# hashes three rows and looks up all entries. Low certainty.
ASSUMED_COMPRESSION: Mapping[str, Linear] = MappingProxyType(
    {"spardl": Linear(3e-3, 1e-10), "topka": Linear(0.5e-3, 1e-10), "count_sketch": Linear(1e-3, 5e-10)}
)


def assumed_compression(workers: int) -> Mapping[str, Linear]:
    """Returns ``ASSUMED_COMPRESSION`` scaled from 64 workers to another number: SparDL selects once per worker."""
    blocks, once = ASSUMED_COMPRESSION["spardl"], ASSUMED_COMPRESSION["topka"]
    launches = once.fixed + (blocks.fixed - once.fixed) * workers / WORKERS
    return {**ASSUMED_COMPRESSION, "spardl": replace(blocks, fixed=launches)}


class Device(NamedTuple):
    """The profiles of models on one device, by name."""

    profiles: Mapping[str, Profile]


def assumed_gpu(models: Sequence[str], measured: Sequence[tuple[str, str, str]] = ()) -> Device:
    """Returns the profiles of models, stretched to the assumed seconds of a GPU.

    Args:
        models: Names of the models.
        measured: Model and file of each measured profile, possibly with further fields, which replaces the assumed one.

    Raises:
        ConfigError: If a profile cannot be read.
    """
    profiles = {
        model: replace(
            Profile.read(PROFILES / f"{model}.json").scaled(ASSUMED[model].seconds),
            device="RTX 2080 Ti, assumed",
            batch=ASSUMED[model].batch,
            update=ASSUMED_UPDATE,
        )
        for model in models
    }
    return Device(profiles | {model: Profile.read(Path(file)) for model, file, *_ in measured if model in models})


@cache
def sizes() -> Mapping[str, int]:
    """Returns the number of parameters of each model."""
    return MappingProxyType({model: sum(Profile.read(PROFILES / f"{model}.json").entries) for model in ASSUMED})
