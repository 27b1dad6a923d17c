"""What a GPU is ASSUMED to take for the published models and methods. Nothing here was measured.

An RTX 2080 Ti in float32, like scripts/bench_schedules.py, whose figures are used where it has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from scripts import bench_schedules
from scripts.exhibits.base import Basis
from scripts.exhibits.passes import MeasuredPasses

__all__ = ["COMPRESSING", "MODELS", "Compressing", "Model", "basis_of", "measured_models", "seconds_to_compress"]

# Of a forward pass, the backward pass costs twice as much; a product and a sum are two operations.
OPERATIONS = 2 * 3


class Model(NamedTuple):
    """One task of a paper, and what its forward and backward pass take.

    Attributes:
        title: as the paper calls it.
        entries: parameters.
        batch: examples of one worker.
        products: of an example's forward pass, counted.
        rate: operations per second that are sustained, assumed.
        certainty: how well the rate is known.
        measured: its passes, if they need not be assumed.
    """

    title: str
    entries: int
    batch: int
    products: float
    rate: float
    certainty: str
    measured: MeasuredPasses | None = None

    @property
    def seconds(self) -> float:
        """Of both passes and the update."""
        if self.measured:
            return self.measured.profile.compute + self.entries * self.measured.profile.update
        return OPERATIONS * self.products * self.batch / self.rate + self.entries * bench_schedules.ASSUMED_UPDATE


# Batches: our presets (docs/configuration.md). Products of convolutions and linear layers are counted; of LSTMs
# and BERT they are the weights that every token meets, times tokens (a review of 230, an utterance of 150 frames).
MODELS: Mapping[str, Model] = MappingProxyType(
    {
        "vgg16": Model("VGG-16 on CIFAR-10", 14_728_266, 16, 0.313e9, 4e12, "a third of the peak, small pictures; low"),
        "vgg19": Model("VGG-19 on CIFAR-100", 20_086_692, 16, 0.398e9, 4e12, "as VGG-16; low"),
        "vgg11": Model("VGG-11 on House", 9_226_497, 4, 0.611e9, 3e12, "as VGG-16, fewer pictures; low"),
        "resnet50": Model("ResNet-50 on ImageNet", 25_557_032, 32, 4.09e9, 7.1e12, "290 pictures/s; medium"),
        "lstm_imdb": Model("LSTM on IMDB", 2_561_052, 1, 6.0e4 * 230, 5e9, "15 us a token and pass; low"),
        "lstm_ptb": Model("LSTM on PTB", 66_034_000, 20, 51.0e6 * 35, 4e12, "matrices of 20 rows; low"),
        "lstm_an4": Model("LSTM on AN4", 27_569_568, 2, 5.7e9, 2e12, "weights read anew every frame; low"),
        "bert": Model("BERT on Wikipedia", 133_547_324, 8, 109e6 * 128, 10e12, "as BERT in bench_schedules; low"),
    }
)


def measured_models(models: Mapping[str, Model], given: Mapping[str, MeasuredPasses]) -> Mapping[str, Model]:
    """Models with measured passes, as far as they are given.

    Raises:
        ConfigError: if one is of a model of another size.
    """
    taken = {name: given[name].checked(name, model.entries) for name, model in models.items() if name in given}
    return {name: model._replace(measured=taken.get(name, model.measured)) for name, model in models.items()}


def basis_of(basis: Basis, measured: Mapping[str, MeasuredPasses]) -> Basis:
    """A basis whose passes are partly measured; ``measured`` is by model."""
    if not measured:
        return basis
    told = "; ".join(f"{name}: {passes.words}" for name, passes in measured.items())
    return basis._replace(
        measured=f"{basis.measured}; passes: {told}",
        assumed=f"{basis.assumed}; but not the passes that were measured",
    )


class Compressing(NamedTuple):
    """What selecting, packing and merging take, in seconds.

    Attributes:
        start: whatever the number of workers.
        worker: for each worker: a selection, or an arrival.
        entry: for each entry of the gradient.
    """

    start: float
    worker: float
    entry: float


_SORTED = bench_schedules.ASSUMED_COMPRESSION["topka"]
_BLOCKS = bench_schedules.ASSUMED_COMPRESSION["spardl"]
_PER_BLOCK = (_BLOCKS.fixed - _SORTED.fixed) / bench_schedules.WORKERS
# A pair that arrives is added to two places of memory, of 32 bytes each at least, at 616 GB/s. Low.
MERGING = 1e-10
# By choice of compressor=. Exact selections as bench_schedules has them, of which SparDL makes one for each block;
# thresholds: six passes over an entry at 616 GB/s instead of fifteen; ten launches of kernels an arrival. All low.
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
    """What a method's own work takes for one gradient.

    Args:
        choice: of compressor=, one of ``COMPRESSING``.
        entries: of the gradient.
        workers: P.
        words: that arrive, of entries and their indices: two words a pair.
    """
    line = COMPRESSING[choice]
    merged = words / 2 * MERGING if line.entry else 0.0
    return line.start + line.worker * workers + line.entry * entries + merged
