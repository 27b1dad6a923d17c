"""Figures that the claims of the Sketch-Fusion SGD paper are judged by."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scripts.exhibits.base import Results
from scripts.exhibits.claims.base import Figure
from scripts.exhibits.claims.evidence import cells, fastest, ratio, tables
from scripts.exhibits.kinds.predictions import Computed
from scripts.exhibits.kinds.schedules import PARTITIONS
from scripts.exhibits.tables import Table

__all__ = ["efficiency", "scalability"]

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
