"""What the study of sparse communication claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scripts.exhibits.base import Results
from scripts.exhibits.claims.base import Figure
from scripts.exhibits.claims.evidence import against, metric, trained
from scripts.exhibits.claims.judging import STAND_INS, Claim, Known, Published
from scripts.exhibits.claims.seeds import NoLoss
from scripts.exhibits.papers.study import DENSE, RANDOM_BLOCK, StudyGrid
from scripts.exhibits.papers.study_points import held_out

__all__ = ["CLAIMS"]


def random_block(exhibit: StudyGrid, scale: str, results: Results) -> Sequence[Figure]:
    """The metric of random blocks at the setting that is best for the other seeds, against dense training."""
    names = [name for name in exhibit.compared(exhibit.plans[scale]) if name in exhibit.grid]
    blocks = [name for name in names if exhibit.grid[name].sent == RANDOM_BLOCK]
    return [
        against(case, _best_elsewhere(exhibit, blocks, figures), figures[DENSE])
        for case, figures in trained(exhibit, scale, results, (DENSE, *blocks), metric).items()
    ]


def _best_elsewhere(exhibit: StudyGrid, blocks: Sequence[str], figures: Mapping[str, Figure]) -> Figure:
    """For each seed, its metric at the setting that is best for the others."""
    values = held_out({exhibit.grid[name]: list(figures[name].values) for name in blocks}, lower=False)
    return Figure(RANDOM_BLOCK, values, (), [job for name in blocks for job in figures[name].jobs])


CLAIMS = (
    Claim(
        "Study: random blocks",
        "Random-block sparsification stays close to standard SGD, with little communication.",
        Published("close to SGD", Known.ABSTRACT, "figures, models and densities unknown"),
        "study.grid",
        random_block,
        NoLoss(),
        "difference of the metric from dense training, at the setting that is best for the other seeds",
        (STAND_INS,),
    ),
)
