"""What the study of sparse communication claims."""

from __future__ import annotations

from collections.abc import Sequence

from scripts.exhibits.base import Results, at
from scripts.exhibits.claims.base import Figure
from scripts.exhibits.claims.evidence import accuracies, against, best_elsewhere
from scripts.exhibits.claims.judging import STAND_INS, Claim, Known, Published
from scripts.exhibits.claims.seeds import NoLoss
from scripts.exhibits.papers.study import DENSE, RANDOM_BLOCK, StudyGrid

__all__ = ["CLAIMS"]


def random_block(exhibit: StudyGrid, scale: str, results: Results) -> Sequence[Figure]:
    """The metric of random blocks at the setting that is best for the other seeds, against dense training."""
    names = [name for name in exhibit.compared(at(scale, exhibit.plans)) if name in exhibit.grid]
    blocks = [name for name in names if exhibit.grid[name].sent == RANDOM_BLOCK]
    return [
        against(case, best_elsewhere(RANDOM_BLOCK, [figures[name] for name in blocks]), figures[DENSE])
        for case, figures in accuracies(exhibit, scale, results, (DENSE, *blocks)).items()
    ]


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
