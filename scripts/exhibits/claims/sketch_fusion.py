"""Claims of the Sketch-Fusion SGD paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scripts.exhibits.base import Results
from scripts.exhibits.claims.base import Figure
from scripts.exhibits.claims.bounds import UpTo
from scripts.exhibits.claims.evidence import cells, fastest, metrics, ratio, tables
from scripts.exhibits.claims.judging import ASSUMED_GPU, MODELLED, OWN_CHOICES, STAND_INS, Claim, Known, Published
from scripts.exhibits.claims.seeds import NoLoss
from scripts.exhibits.kinds.fusion import PARTITIONS
from scripts.exhibits.kinds.predictions import Computed
from scripts.exhibits.kinds.trainings import MethodComparison
from scripts.exhibits.tables import Table

__all__ = ["CLAIMS"]

SKETCH, DENSE = "count_sketch", "none"


def efficiency(exhibit: Computed, scale: str, results: Results) -> Sequence[Figure]:
    """Seconds with the fastest other partition of sketches over those with LayerFusion."""
    found = _partitions(tables(exhibit, scale, results), lambda row: row.endswith(f", {SKETCH}"))
    return [_gain(key, others, fused) for key, (others, fused) in found.items()]


def scalability(exhibit: Computed, scale: str, results: Results) -> Sequence[Figure]:
    """Scaling efficiency of other compressors with LayerFusion over that of the best other partition."""
    shares = _partitions(tables(exhibit, scale, results), _other)
    slowness = {
        key: ([_inverse(other) for other in others], _inverse(fused)) for key, (others, fused) in shares.items()
    }
    return [_gain(key, others, fused) for key, (others, fused) in slowness.items()]


def _partitions(
    made: Sequence[Table], rows: Callable[[str], bool]
) -> dict[tuple[str, str], tuple[list[Figure], Figure]]:
    """By table and row: the figures of other partitions, named after them, and LayerFusion's."""
    *others, fused = (
        {key: each._replace(name=name) for key, each in cells(made, name, rows).items()} for name in PARTITIONS
    )
    return {key: ([other[key] for other in others], figure) for key, figure in fused.items()}


def _inverse(figure: Figure) -> Figure:
    """Turns shares of the ideal speed into multiples of the ideal seconds."""
    return figure._replace(values=[1 / value for value in figure.values])


def _gain(key: tuple[str, str], others: Sequence[Figure], fused: Figure) -> Figure:
    """Gain of fusion over the fastest other partition, which is named; the remark gives the gain over single layers."""
    rival, (alone, *_) = fastest(others), others
    remark = "" if alone is rival else f"{ratio('', alone, fused).mean:.4g}x against {alone.name}"
    return ratio(f"{_on(*key)}, against {rival.name}", rival, fused)._replace(remark=remark)


def _other(row: str) -> bool:
    return not row.endswith((f", {SKETCH}", f", {DENSE}"))


def _on(title: str, row: str) -> str:
    return f"{row}, {title.rpartition(', ')[2]}"


def accuracy(exhibit: MethodComparison, scale: str, results: Results) -> Sequence[Figure]:
    """Metric with sketches of groups against dense training in every case."""
    return metrics(exhibit, scale, results, "sketches of groups", "dense")


SUPERSET = (
    "it cannot be slower, because fusion chooses the fastest of all partitions by the same model, and its rivals are "
    "among them; the gain rests on GPU times that are assumed with low certainty, not measured"
)
CODE = "published seconds include the cost of the published code, which is not known, ours do not"
CLAIMS = (
    Claim(
        "Sketch-Fusion: training efficiency",
        "Sketch-Fusion SGD trains up to 18.6% more efficiently than the state of the art.",
        Published("up to 18.6%", Known.ABSTRACT, "the baseline is not stated there"),
        "sketch_fusion.fusion",
        efficiency,
        UpTo(1.186),
        "seconds of an iteration with the fastest other partition (layers, buckets, model) over those with LayerFusion",
        (ASSUMED_GPU, MODELLED, OWN_CHOICES),
        SUPERSET,
        CODE,
    ),
    Claim(
        "Sketch-Fusion: LayerFusion for others",
        "LayerFusion improves the scalability of other compressors by up to 2.87x.",
        Published("up to 2.87x", Known.ABSTRACT, "the compressor is not stated there"),
        "sketch_fusion.scaling",
        scalability,
        UpTo(2.87),
        "scaling efficiency at 16 workers with LayerFusion over the best other partition (layers, buckets, model)",
        (ASSUMED_GPU, MODELLED, OWN_CHOICES),
        SUPERSET,
        CODE,
    ),
    Claim(
        "Sketch-Fusion: accuracy",
        "Sketch-Fusion SGD loses no accuracy.",
        Published("no loss", Known.ABSTRACT, "figures unknown"),
        "sketch_fusion.accuracy",
        accuracy,
        NoLoss(),
        "difference from the metric of dense training",
        (STAND_INS, OWN_CHOICES),
    ),
)
