"""What Sketch-Fusion SGD's paper claims."""

from __future__ import annotations

from collections.abc import Sequence

from scripts.exhibits.base import Results
from scripts.exhibits.claims.base import Figure
from scripts.exhibits.claims.bounds import UpTo
from scripts.exhibits.claims.evidence import cells, metrics, ratio, tables
from scripts.exhibits.claims.judging import ASSUMED_GPU, MODELLED, OWN_CHOICES, STAND_INS, Claim, Known, Published
from scripts.exhibits.claims.seeds import NoLoss
from scripts.exhibits.kinds.predictions import Computed
from scripts.exhibits.kinds.trainings import MethodComparison

__all__ = ["CLAIMS"]

SKETCH, DENSE = "count_sketch", "none"


def efficiency(exhibit: Computed, scale: str, results: Results) -> Sequence[Figure]:
    """Seconds with sketches of layers, or of the model if that is faster, over those with fused ones."""
    made = tables(exhibit, scale, results)
    found = cells(made, "better of both / fused", lambda row: row.endswith(f", {SKETCH}"))
    return [figure._replace(name=_on(title, row)) for (title, row), figure in found.items()]


def scalability(exhibit: Computed, scale: str, results: Results) -> Sequence[Figure]:
    """Scaling efficiency of other compressors with LayerFusion over that of every layer alone."""
    made = tables(exhibit, scale, results)
    fused, alone = (cells(made, column, _other) for column in ("LayerFusion", "every layer alone"))
    return [ratio(_on(*key), figure, alone[key]) for key, figure in fused.items()]


def _other(row: str) -> bool:
    return not row.endswith((f", {SKETCH}", f", {DENSE}"))


def _on(title: str, row: str) -> str:
    return f"{row}, {title.rpartition(', ')[2]}"


def accuracy(exhibit: MethodComparison, scale: str, results: Results) -> Sequence[Figure]:
    """The metric with sketches of groups, in every case."""
    return metrics(exhibit, scale, results, "sketches of groups", "dense")


CLAIMS = (
    Claim(
        "Sketch-Fusion: training efficiency",
        "Sketch-Fusion SGD trains up to 18.6% more efficiently than the state of the art.",
        Published("up to 18.6%", Known.ABSTRACT, "the baseline is not stated there"),
        "sketch_fusion.fusion",
        efficiency,
        UpTo(1.186),
        "seconds of an iteration with sketches of layers, or of the model if that is faster, over fused ones",
        (ASSUMED_GPU, MODELLED, OWN_CHOICES),
    ),
    Claim(
        "Sketch-Fusion: LayerFusion for others",
        "LayerFusion improves the scalability of other compressors by up to 2.87 times.",
        Published("up to 2.87x", Known.ABSTRACT, "for which compressor is not stated there"),
        "sketch_fusion.scaling",
        scalability,
        UpTo(2.87),
        "scaling efficiency at 16 workers, fused, over that of every layer alone",
        (ASSUMED_GPU, MODELLED, OWN_CHOICES),
    ),
    Claim(
        "Sketch-Fusion: accuracy",
        "Sketch-Fusion SGD loses no accuracy.",
        Published("no loss", Known.ABSTRACT, "figures unknown"),
        "sketch_fusion.accuracy",
        accuracy,
        NoLoss(),
        "difference of the metric from dense training",
        (STAND_INS, OWN_CHOICES),
    ),
)
