"""All claims in the order of the papers, and their section of the report."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from inspect import signature
from pathlib import Path
from types import MappingProxyType

from scripts.exhibits.base import Basis, Exhibit, Results
from scripts.exhibits.claims.base import Rule
from scripts.exhibits.claims.judging import LIMITS, Claim, Judgement, Limit, claims_table, judge, summary_table
from scripts.exhibits.claims.page import detailed_table
from scripts.exhibits.claims.rules import AtLeast, AtMost, Between, Equal, InnerBest, Keeps, NoLoss, Order, UpTo, Within
from scripts.exhibits.declared import Keys, Node, Reader, Variants, entries, fail, meant, parse
from scripts.exhibits.jobs import Job, Outcome
from scripts.exhibits.pages.page import Section
from scripts.exhibits.pages.sections import key, tables_section
from scripts.exhibits.pages.verdicts import Judged, Part
from scripts.exhibits.papers.catalogue import papers
from scripts.exhibits.tables import Table
from scripts.exhibits.tried import marks

__all__ = ["OnDemand", "claims_section", "judge_all", "load", "load_all", "tables_of"]

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


def load(path: Path, exhibits: Collection[str]) -> tuple[Claim, ...]:
    """The claims of a file.

    Args:
        path: The file, with ``definitions:`` (optional) and ``claims:``.
        exhibits: Names of the exhibits that claims can refer to.

    Raises:
        ConfigError: if the file does not fit to the classes of claims, a claim refers to an exhibit that does not
            exist, or ``arguments`` does not fit to the function of ``find``.
    """
    parts = entries(parse(path), path.stem, Keys(("claims",), ("definitions",)))
    definitions = entries(parts["definitions"], "definitions") if "definitions" in parts else {}
    reader = Reader(definitions, RULES, "scripts.exhibits.claims", {Limit: LIMITS})
    nodes = entries(parts["claims"], "claims")
    claims = {name: reader.read(Claim, node, name, name=name) for name, node in nodes.items()}
    for name, claim in claims.items():
        _check(claim, exhibits, nodes[name])
    return tuple(claims.values())


def _check(claim: Claim, exhibits: Collection[str], node: Node) -> None:
    for name in claim.exhibits:
        if name not in exhibits:
            fail(node, claim.name, f"exhibit {name!r} does not exist; {meant(name, tuple(exhibits))}")
    try:
        signature(claim.find).bind(None, "", None, **dict(claim.arguments))
    except TypeError as error:
        fail(node, claim.name, f"arguments do not fit to find: {error}")


@cache
def load_all() -> tuple[Claim, ...]:
    """The claims of all papers."""
    return load(FILE, papers())


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
    return [judge(claim, exhibits, scale, results) for claim in load_all()]


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
    tasks = [Part(each.task, each.finding.label, marks(each.jobs), each.finding.ours) for each in judgement.tasks]
    paper = f"{claim.published.figure} ({claim.published.origin})"
    return Judged(claim.name, paper, finding.ours, finding.label, claim.exhibits, marks(judgement.jobs), tasks)
