"""All claims, in the order of the papers, and what is on disk about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scripts.exhibits.base import Basis, Exhibit, Results
from scripts.exhibits.claims import dear, oktopk, sketch_fusion, spardl, study
from scripts.exhibits.claims.details import detailed_table
from scripts.exhibits.claims.judging import Judgement, claims_table, judge, summary_table
from scripts.exhibits.jobs import Job, Outcome
from scripts.exhibits.pages.page import Section
from scripts.exhibits.pages.sections import key, tables_section
from scripts.exhibits.tables import Table

__all__ = ["CLAIMS", "OnDemand", "claims_section", "judge_all", "tables_of"]

CLAIMS = (
    *spardl.CLAIMS,
    *oktopk.CLAIMS,
    *study.CLAIMS,
    *dear.CLAIMS,
    *sketch_fusion.CLAIMS,
)
BASIS = Basis(*["what the basis of each claim's exhibit says; see there"] * 3)
WORDS = (
    "What the papers claim, and what was found here. Verdicts follow from rules (docs/tables/claims.md); none was "
    "written by hand."
)


@dataclass(frozen=True)
class OnDemand(Results):
    """Results that are looked up when they are asked for: claims need few of all."""

    found: Mapping[Job, Outcome] = field(default_factory=dict)
    seen: dict[Job, Outcome] = field(default_factory=dict)

    def of(self, job: Job) -> Outcome:
        """See :meth:`Results.of`."""
        if job not in self.seen:
            self.seen[job] = self.look(job) or super().of(job)
        return self.seen[job]


def judge_all(exhibits: Mapping[str, Exhibit], scale: str, results: Results) -> list[Judgement]:
    """Judges every claim by what was found.

    Args:
        exhibits: all, by name.
        scale: of the work.
        results: of the work.

    Raises:
        KeyError: if a claim's exhibit is not among them.
    """
    return [judge(claim, exhibits, scale, results) for claim in CLAIMS]


def tables_of(judgements: Sequence[Judgement]) -> list[Table]:
    """How many claims got which verdict, and all of them."""
    return [summary_table(judgements), claims_table(judgements)]


def claims_section(judgements: Sequence[Judgement], scale: str, results: Results) -> Section:
    """The claims' section of the report; how many got which verdict stands in the page's summary."""
    return tables_section(key("claims", scale), "Claims", WORDS, scale, [detailed_table(judgements)], BASIS, results)
