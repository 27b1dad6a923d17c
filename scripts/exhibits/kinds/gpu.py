"""ASSUMED GPU times of the published models and methods. Nothing here was measured.

The GPU is an RTX 2080 Ti in float32, as in scripts/benchmarks/schedules.py, whose figures are used where available.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from scripts.benchmarks import schedules as bench_schedules

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
        return OPERATIONS * self.products * self.batch / self.rate + self.entries * bench_schedules.ASSUMED_UPDATE


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
        "bert": Model("BERT on Wikipedia", 133_547_324, 8, 109e6 * 128, 10e12, "as BERT in bench_schedules; low"),
    }
)


class Compressing(NamedTuple):
    """Seconds of selecting, packing and merging: a constant part, per worker, and per entry of the gradient."""

    start: float
    worker: float
    entry: float


_SORTED = bench_schedules.ASSUMED_COMPRESSION["topka"]
_BLOCKS = bench_schedules.ASSUMED_COMPRESSION["spardl"]
_PER_BLOCK = (_BLOCKS.fixed - _SORTED.fixed) / bench_schedules.WORKERS
# An arriving pair updates two memory locations of at least 32 bytes each, at 616 GB/s. Low certainty.
MERGING = 1e-10
# By choice of compressor=. Exact selections are those of bench_schedules, one per block for SparDL. Thresholds take six
# instead of fifteen memory accesses per entry at 616 GB/s, and ten kernel launches per arrival. Low certainty.
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
