"""ASSUMED GPU times of the published models and methods. Nothing here was measured.

The GPU is an RTX 2080 Ti in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from spardl.clusters.profile import Profile
from spardl.schedules.fusion import Linear

PROFILES = Path(__file__).resolve().parents[2] / "profiles"
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


def assumed_gpu(models: Sequence[str]) -> dict[str, Profile]:
    """Returns the profiles of models, stretched to the assumed seconds of a GPU.

    Raises:
        ConfigError: If a profile cannot be read.
    """
    return {
        model: replace(
            Profile.read(PROFILES / f"{model}.json").scaled(ASSUMED[model].seconds),
            device="RTX 2080 Ti, assumed",
            batch=ASSUMED[model].batch,
            update=ASSUMED_UPDATE,
        )
        for model in models
    }


# A backward pass costs twice as much as a forward pass; a product and a sum are two operations.
OPERATIONS = 2 * 3


class Model(NamedTuple):
    """A task of a paper: number of parameters, examples per worker, and the assumed costs of its passes.

    Attributes:
        products: Counted products in the forward pass of one example.
        rate: Assumed sustained operations per second.
        certainty: Source of the rate and its reliability.
    """

    title: str
    entries: int
    batch: int
    products: float
    rate: float
    certainty: str

    @property
    def seconds(self) -> float:
        """Seconds of both passes and the update."""
        return OPERATIONS * self.products * self.batch / self.rate + self.entries * ASSUMED_UPDATE


# Batches are those of our presets (docs/configuration.md). Products of convolutions and linear layers are counted;
# those of LSTMs and BERT are weights times tokens (230 per review, 150 frames per utterance).
MODELS: Mapping[str, Model] = MappingProxyType(
    {
        "vgg16": Model("VGG-16 on CIFAR-10", 14_728_266, 16, 0.313e9, 4e12, "a third of the peak, small pictures; low"),
        "vgg19": Model("VGG-19 on CIFAR-100", 20_086_692, 16, 0.398e9, 4e12, "as VGG-16; low"),
        "vgg11": Model("VGG-11 on House", 9_226_497, 4, 0.611e9, 3e12, "as VGG-16, fewer pictures; low"),
        "resnet50": Model("ResNet-50 on ImageNet", 25_557_032, 32, 4.09e9, 7.1e12, "290 pictures/s; medium"),
        "lstm_imdb": Model("LSTM on IMDB", 2_561_052, 1, 6.0e4 * 230, 5e9, "15 us a token and pass; low"),
        "lstm_ptb": Model("LSTM on PTB", 66_034_000, 20, 51.0e6 * 35, 4e12, "matrices of 20 rows; low"),
        "lstm_an4": Model("LSTM on AN4", 27_569_568, 2, 5.7e9, 2e12, "weights read again in every frame; low"),
        "bert": Model("BERT on Wikipedia", 133_547_324, 8, 109e6 * 128, 10e12, "as BERT-Base in ASSUMED; low"),
    }
)


class Compressing(NamedTuple):
    """Seconds of selecting, packing and merging: a constant part, per worker, and per entry of the gradient."""

    start: float
    worker: float
    entry: float


_SORTED = ASSUMED_COMPRESSION["topka"]
_BLOCKS = ASSUMED_COMPRESSION["spardl"]
_PER_BLOCK = (_BLOCKS.fixed - _SORTED.fixed) / WORKERS
# An arriving pair updates two memory locations of at least 32 bytes each, at 616 GB/s. Low certainty.
MERGING = 1e-10
# By choice of compressor=. Exact selections are those of ASSUMED_COMPRESSION, one per block for SparDL. Thresholds take
# six instead of fifteen memory accesses per entry at 616 GB/s, and ten kernel launches per arrival. Low certainty.
COMPRESSING: Mapping[str, Compressing] = MappingProxyType(
    {
        "spardl": Compressing(_SORTED.fixed, _PER_BLOCK, _BLOCKS.per_entry),
        "oktopk": Compressing(1e-3, 2e-5, 4e-11),
        "topkdsa": Compressing(_SORTED.fixed, 2e-5, _SORTED.per_entry),
        "topka": Compressing(_SORTED.fixed, 1e-5, _SORTED.per_entry),
        "gtopk": Compressing(_SORTED.fixed, 1e-5, _SORTED.per_entry),
        "gaussiank": Compressing(_SORTED.fixed, 1e-5, 4e-11),
        "none": Compressing(0.0, 0.0, 0.0),
    }
)


def seconds_to_compress(choice: str, entries: int, workers: int, words: float) -> float:
    """Seconds of local work of a method for one gradient of some entries, of which a worker receives some words."""
    line = COMPRESSING[choice]
    merged = words / 2 * MERGING if line.entry else 0.0
    return line.start + line.worker * workers + line.entry * entries + merged
