"""The page of all claims, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scripts.exhibits.claims.base import Verdict
from scripts.exhibits.claims.bounds import BEYOND
from scripts.exhibits.claims.judging import TRIVIAL, Claim, Judgement, Limit, claims_table, summary_table
from scripts.exhibits.claims.lengths import SWEEPS
from scripts.exhibits.tables import markdown

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
    sections = "\n".join(map(_section, judgements))
    tables = f"{markdown(summary_table(judgements))}\n## Claim by claim\n\n{markdown(claims_table(judgements))}"
    return f"{head}\n## Verdicts\n\n{tables}\n## How each was judged\n\n{sections}"


def _section(judgement: Judgement) -> str:
    claim, basis = judgement.claim, judgement.basis
    note = f"; {claim.published.note}" if claim.published.note else ""
    limits = [f"{limit.reason} ({_bounds(limit)})" for limit in claim.limits_at(judgement.scale)]
    lines = {
        "Published": f"{claim.published.figure} ({claim.published.known.value}{note})",
        "Ours": f"{claim.measure}: {judgement.finding.ours}",
        "Rule": claim.rule.words,
        "Verdict": f"{judgement.finding.label}. Because: {judgement.finding.reason}",
        "Limits": "; ".join(limits) or "none",
        **({"By construction": _built_in(claim)} if claim.construction else {}),
        "Setting": f"`{claim.exhibit}`, scale {judgement.scale}. {judgement.setting}",
        **{kind.capitalize(): text for kind, text in basis._asdict().items()},
    }
    told = "\n".join(f"* **{name}:** {_escaped(text)}" for name, text in lines.items())
    return f"### {claim.name}\n\n{claim.states}\n\n{told}\n"


def _built_in(claim: Claim) -> str:
    """Why it has to be true, and what the rule's words become then."""
    return f"{claim.construction}; what the rule finds true is {Verdict.BUILT_IN}"


def _bounds(limit: Limit) -> str:
    """Between which verdicts it leaves a choice."""
    worst = "" if limit.at_worst is Verdict.NOT else f", {limit.at_worst} at worst"
    return f"{limit.at_best} at best{worst}"


def _escaped(text: str) -> str:
    """Without marks that Markdown would take for its own, such as in names of variables."""
    return text.replace("*", "\\*").replace("<", "&lt;")
