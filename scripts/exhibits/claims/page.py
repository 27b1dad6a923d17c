"""The page of all claims, as Markdown."""

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

What the five papers claim, and what was found here. All of this page is generated from results on disk; no verdict on
it was written by hand:

```sh
{making}
{command}
```

## How to read it

How surely a published figure is known is said beside it: we did not have the papers' full texts. The rules are the same
whichever way a verdict falls:

* An **accuracy** is judged only after at least {sweeps}/density synchronizations (so that an entry of average size was
  sent {sweeps} times), and beside a dense twin that reached what is known of its model and data. Else it
  *{unjudged}*; the reason gives both numbers. Work of the scale `{trivial}` is never judged, nor what is
  missing or has failed.
* A **gain** is *{direction}* only from half of the published one on, in logarithms; less is *{bad}*.
  More than {beyond:g} times as much, in logarithms, is an *overshoot*: something else differs, too, and the verdict
  says so.
* In comparisons of **speed** the rival is the fastest one of all that ran, and is named.
* What **has to be true** of figures made in this way (counts against our own formula, a bound inside the model, the
  best of a set that holds its rivals) is *{built_in}*, and counts apart.
* What rests on a **guess** of what a GPU takes can neither be *{good}* nor *{bad}*.
* Where the **setting** is not the published one, a verdict is cut down, and the reason says why.
* Figures over **seeds** have Student's 95% interval of the mean behind them, of three seeds at least.
* One worker **alone** sends nothing. Where it passes the test of a method's accuracy, too, the reason says so: there
  the method is shown to do no harm, and nothing more.

*GRES*, *PRES* and *LRES* are [rules of residuals](../methods.md): of what is lost on the way, all is kept, some of
it, or nothing. *R-SAG* and *B-SAG* are ways in which [SparDL's d teams](../methods.md) exchange their sums: by
recursive doubling, where d is a power of two, and as Bruck's all-gather does for any d.

Each claim's rule and limits, what ran, and what of it was simulated, measured and assumed, fold out beside its verdict
in [the report](../reproducing-papers.md#the-report).
"""


def page(judgements: Sequence[Judgement], scale: str, outputs: Path | None, path: Path) -> str:
    """The whole page, as Markdown.

    Args:
        judgements: of all claims, at least one.
        scale: of the work.
        outputs: the folder of runs that it was found in; ``None``: among the records.
        path: of the page, for the command that makes it again.
    """
    where = f" --outputs {outputs.as_posix()}" if outputs else ""
    making = f"python scripts/reproduce.py all --scale {scale} --jobs 2{where or ' --record'}"
    command = f"python scripts/claims.py --scale {scale}{where} --write {path.as_posix()}"
    names = {"good": Verdict.REPRODUCED, "direction": Verdict.DIRECTION, "unjudged": Verdict.UNJUDGED}
    names |= {"bad": Verdict.NOT, "built_in": Verdict.BUILT_IN}
    head = INTRODUCTION.format(making=making, command=command, trivial=TRIVIAL, sweeps=SWEEPS, beyond=BEYOND, **names)
    sections = {
        "Verdicts": markdown(summary_table(judgements)),
        "Claim by claim": markdown(_short(claims_table(judgements))),
        "Why": "".join(f"* **{each.claim.name}**: {each.finding.reason}.\n" for each in judgements),
    }
    return "\n".join([head, *(f"## {title}\n\n{content}" for title, content in sections.items())])


def _short(table: Table) -> Table:
    """Without the reasons, which are its last column."""
    rows = [row._replace(cells=row.cells[:-1]) for row in table.rows]
    return replace(table, columns=table.columns[:-1], rows=rows)
