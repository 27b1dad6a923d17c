"""Figures that the claim of the study of sparse communication is judged by."""

from __future__ import annotations

from collections.abc import Sequence

from scripts.exhibits.base import Results
from scripts.exhibits.claims.base import Figure
from scripts.exhibits.claims.evidence import accuracies, against, best_elsewhere
from scripts.exhibits.claims.judging import NoEvidence
from scripts.exhibits.kinds.study import DENSE, RANDOM_BLOCK, StudyRates

__all__ = ["random_block"]


def random_block(exhibit: StudyRates, scale: str, results: Results) -> Sequence[Figure]:
    """Metric of random blocks against dense training, each at the setting that is best for the other seeds."""
    blocks, dense = (exhibit.choices_of(sent, scale, results) for sent in (RANDOM_BLOCK, DENSE))
    if not (blocks and dense):
        raise NoEvidence("all settings failed", exhibit.jobs(scale))
    return [
        against(
            case,
            best_elsewhere(RANDOM_BLOCK, [figures[name] for name in blocks]),
            best_elsewhere(DENSE, [figures[name] for name in dense]),
        )
        for case, figures in accuracies(exhibit, scale, results, (*dense, *blocks)).items()
    ]
