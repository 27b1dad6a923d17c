"""All claims in the order of the papers, and their section of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from scripts.exhibits.base import Basis, Exhibit, Results
from scripts.exhibits.claims.base import Rule
from scripts.exhibits.claims.bounds import AtLeast, AtMost, Between, Equal, Keeps, UpTo, Within
from scripts.exhibits.claims.details import detailed_table
from scripts.exhibits.claims.judging import LIMITS, Claim, Judgement, Limit, claims_table, judge, summary_table
from scripts.exhibits.claims.seeds import InnerBest, NoLoss, Order
from scripts.exhibits.declared import Reader, Variants, entries, parse
from scripts.exhibits.jobs import Job, Outcome
from scripts.exhibits.pages.page import Section
from scripts.exhibits.pages.sections import key, tables_section
from scripts.exhibits.pages.verdicts import Judged
from scripts.exhibits.tables import Table
from scripts.exhibits.tried import marks

__all__ = ["CLAIMS", "OnDemand", "claims_section", "judge_all", "load_claims", "tables_of"]

FILE = Path(__file__).with_name("claims.yaml")
RULES: Variants = MappingProxyType(
    {
        Rule: {
            "up_to": UpTo,
            "between": Between,
            "keeps": Keeps,
            "at_most": AtMost,
            "at_least": AtLeast,
            "equal": Equal,
            "within": Within,
            "no_loss": NoLoss,
            "order": Order,
            "inner_best": InnerBest,
        }
    }
)


def load_claims(path: Path = FILE) -> tuple[Claim, ...]:
    """The claims of a file.

    Args:
        path: The file, with ``definitions:`` and ``claims:``.

    Raises:
        ConfigError: if the file does not fit to the classes of claims.
    """
    parts = entries(parse(path), path.stem, ("definitions", "claims"))
    definitions = entries(parts["definitions"], "definitions")
    reader = Reader(definitions, RULES, "scripts.exhibits.claims", {Limit: LIMITS})
    claims = entries(parts["claims"], "claims")
    return tuple(reader.read(Claim, node, name, name=name) for name, node in claims.items())


CLAIMS = load_claims()
BASIS = Basis(*["see the exhibit of each claim"] * 3)
WORDS = "Reason and rule of every verdict. All verdicts are computed by rules (docs/tables/claims.md)."


@dataclass(frozen=True)
class OnDemand(Results):
    """Results that are looked up on demand, because claims need few of them."""

    found: Mapping[Job, Outcome] = field(default_factory=dict)
    seen: dict[Job, Outcome] = field(default_factory=dict)

    def of(self, job: Job) -> Outcome:
        """Outcome of a job, looked up once."""
        if job not in self.seen:
            self.seen[job] = self.look(job) or super().of(job)
        return self.seen[job]


def judge_all(exhibits: Mapping[str, Exhibit], scale: str, results: Results) -> list[Judgement]:
    """Judges every claim by the available results.

    Args:
        exhibits: All exhibits by name.
        scale: Size preset of the runs.
        results: Results of the runs.

    Raises:
        KeyError: if the exhibit of a claim is missing.
    """
    return [judge(claim, exhibits, scale, results) for claim in CLAIMS]


def tables_of(judgements: Sequence[Judgement]) -> list[Table]:
    """The table of verdicts and the table of claims."""
    return [summary_table(judgements), claims_table(judgements)]


def claims_section(judgements: Sequence[Judgement], scale: str, results: Results) -> Section:
    """Section of all claims with the basis of each verdict; the summary of the page is derived from it."""
    judged = [_judged(judgement) for judgement in judgements]
    tables = [detailed_table(judgements)]
    return tables_section(key("claims", scale), "Claims", WORDS, scale, tables, BASIS, results, judged)


def _judged(judgement: Judgement) -> Judged:
    claim, finding = judgement.claim, judgement.finding
    tasks = [(task.task, task.finding.label, marks(task.jobs)) for task in judgement.tasks]
    paper = f"{claim.published.figure} ({claim.published.origin})"
    return Judged(claim.name, paper, finding.ours, finding.label, claim.exhibits, marks(judgement.jobs), tasks)
