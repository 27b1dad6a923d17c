"""Markdown page of all claims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from scripts.exhibits.base import SWEEPS
from scripts.exhibits.claims.base import Verdict
from scripts.exhibits.claims.bounds import BEYOND
from scripts.exhibits.claims.judging import TRIVIAL, Judgement, claims_table, summary_table
from scripts.exhibits.tables import Table, markdown

__all__ = ["page"]

INTRODUCTION = """\
# Claims

Claims of the five papers and our results. This page is generated from results on disk; no verdict on it was written by
hand:

```sh
{making}
{command}
```

## How to read it

We did not have the full texts of the papers; the column *paper* says how each published figure is known. The same rules
apply whichever way a verdict falls:

* Every **task** gets its own verdict, and then the claim as a whole: *{mixed}* if some tasks support the claim and
  others do not, otherwise the worst verdict. A task that was not run has no verdict.
* An **accuracy** is judged only after at least {sweeps}/density synchronizations (so that an entry of average size was
  sent {sweeps} times), and only if the dense baseline has converged: it reaches a reference value with a source, or
  the confidence interval of its seeds contains that value. Otherwise it *{unjudged}*; the reason gives both numbers.
  Runs of the size `{trivial}` are never judged, nor are missing or failed ones.
* A loss within 1% whose confidence interval excludes equality is *{worse}*, never *{direction}*.
* A **gain** is *{direction}* if it is at least half of the published one, in logarithms, and *{bad}*
  otherwise. More than {beyond:g} times that, in logarithms, is an *overshoot*: something else must differ, and the
  verdict says so.
* In comparisons of **speed** the rival is the fastest method that ran, and is named. Seconds are compared within one
  machine only (processor and torch version).
* Figures that **must satisfy** the claim by construction (counts against our own formula, a bound inside the model, the
  best of a set that contains its rivals) are *{built_in}* and counted separately.
* Claims whose figures rest on **assumed GPU times**, or on four workers on one machine instead of the published
  cluster, are called neither *{good}* nor *{bad}*.
* Where the **setting** is not the published one, the verdict is limited, and the reason says why.
* Figures over **seeds** have Student's 95% interval of the mean, of at least three seeds.
* A **single worker** communicates nothing. If it passes the accuracy test of a method, the reason says so: the task
  then only shows that the method does no harm.

*GRES*, *PRES* and *LRES* are [residual rules](../methods.md): they keep all, some or none of the values that are
dropped on the way. *R-SAG* and *B-SAG* are the ways in which [SparDL's d teams](../methods.md) exchange their sums:
recursive doubling, for powers of two, and Bruck's all-gather, for any d.

Rule and limits of each claim, the setting, and the simulated, measured and assumed quantities are in
[the report](../reproducing-papers.md#the-report).
"""


def page(judgements: Sequence[Judgement], scale: str, outputs: Path | None, path: Path) -> str:
    """The whole page, as Markdown.

    Args:
        judgements: Verdicts on all claims, at least one.
        scale: Size preset of the runs.
        outputs: Folder of the runs; ``None`` stands for the records.
        path: Path of the page, for the command that makes it again.
    """
    where = f" --outputs {outputs.as_posix()}" if outputs else ""
    making = f"python scripts/reproduce.py all --scale {scale} --jobs 2{where or ' --record'}"
    command = f"python scripts/claims.py --scale {scale}{where} --write {path.as_posix()}"
    names = {"good": Verdict.REPRODUCED, "direction": Verdict.DIRECTION, "unjudged": Verdict.UNJUDGED}
    names |= {"bad": Verdict.NOT, "built_in": Verdict.BUILT_IN, "mixed": Verdict.MIXED, "worse": Verdict.WORSE}
    head = INTRODUCTION.format(making=making, command=command, trivial=TRIVIAL, sweeps=SWEEPS, beyond=BEYOND, **names)
    sections = {
        "Verdicts": markdown(summary_table(judgements)),
        "Claim by claim": markdown(_short(claims_table(judgements))),
        "Why": "".join(f"* **{each.claim.name}**: {each.finding.reason}.\n" for each in judgements),
    }
    return "\n".join([head, *(f"## {title}\n\n{content}" for title, content in sections.items())])


def _short(table: Table) -> Table:
    """The table without its last column, the reasons."""
    rows = [row._replace(cells=row.cells[:-1]) for row in table.rows]
    return replace(table, columns=table.columns[:-1], rows=rows)
