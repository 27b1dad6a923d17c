"""All claims in the order of the papers, their verdicts, and the page and the section of the report that show them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from inspect import signature
from pathlib import Path
from types import MappingProxyType

from scripts.exhibits.base import SWEEPS, Exhibit, Results
from scripts.exhibits.catalogue import papers
from scripts.exhibits.claims import rules
from scripts.exhibits.claims.judging import OVERSHOT, TRIVIAL, Claim, Judgement, Rule, Verdict, judge
from scripts.exhibits.declared import Keys, Node, Reader, Variants, entries, fail, meant, parse
from scripts.exhibits.jobs import Job, Outcome
from scripts.exhibits.pages import Section, behind, chip, few_sources, made_with
from scripts.exhibits.tables import Cell, Row, Table, markdown, render, render_page

FILE = Path(__file__).with_name("claims.yaml")
TEMPLATE = Path(__file__).resolve().parents[3] / "docs" / "tables" / "claims.md.j2"
RULES: Variants = MappingProxyType(
    {
        Rule: {
            "up_to": rules.UpTo,
            "between": rules.Between,
            "keeps": rules.Keeps,
            "at_most": rules.AtMost,
            "at_least": rules.AtLeast,
            "equal": rules.Equal,
            "within": rules.Within,
            "no_loss": rules.NoLoss,
            "order": rules.Order,
            "inner_best": rules.InnerBest,
        }
    }
)
WORDS = "Reason and rule of every verdict. All verdicts are computed by rules (docs/tables/claims.md)."
PAPER = "paper (table or figure)"
COLUMNS = ("claim", PAPER, "ours", "verdict", "because")


def load(path: Path, exhibits: Collection[str]) -> tuple[Claim, ...]:
    """The claims of a file with ``definitions:`` (optional) and ``claims:``, which can refer to these exhibits.

    Raises:
        ConfigError: If the file does not fit to the classes of claims, a claim refers to an exhibit that does not
            exist, or ``arguments`` does not fit to the function of ``find``.
    """
    parts = entries(parse(path), path.stem, Keys(("claims",), ("definitions",)))
    definitions = entries(parts["definitions"], "definitions") if "definitions" in parts else {}
    reader = Reader(definitions, RULES, __package__)
    nodes = entries(parts["claims"], "claims")
    claims = tuple(reader.read(Claim, node, name, name=name) for name, node in nodes.items())
    for claim in claims:
        _check(claim, exhibits, nodes[claim.name])
    return claims


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
    """Judges every claim by the available results of all exhibits, by name."""
    return [judge(claim, exhibits, scale, results) for claim in load_all()]


def tables_of(judgements: Sequence[Judgement]) -> list[Table]:
    """The table of verdicts and the table of claims; overshoots are counted separately."""
    labels = [judgement.finding.label for judgement in judgements]
    named = [f"{verdict}{mark}" for verdict in Verdict for mark in ("", OVERSHOT)]
    counts = []
    for label in (label for label in named if label in labels or not label.endswith(OVERSHOT)):
        names = [judgement.claim.name for judgement in judgements if judgement.finding.label == label]
        counts.append(Row(label, [Cell(str(len(names)), len(names)), Cell("; ".join(names) or "-")], ()))
    rows = []
    for claim, finding, *_ in judgements:
        verdict = Cell(finding.label, bad=finding.verdict is Verdict.NOT)
        rows.append(
            Row(claim.name, [Cell(str(claim.published)), Cell(finding.ours), verdict, Cell(finding.reason)], ())
        )
    return [Table("Verdicts", ("verdict", "claims", "which"), counts), Table("Claims", COLUMNS, rows)]


def claims_section(judgements: Sequence[Judgement], scale: str, results: Results) -> Section:
    """Section of all claims with everything that each verdict rests on."""
    own, rows = f"claims-{scale}", [Row(each.claim.name, (), each.jobs) for each in judgements]
    shown = [
        (
            each.claim.name,
            chip(each.finding),
            f"paper: {each.claim.published}; ours: {each.finding.ours}",
            _details(each),
        )
        for each in judgements
    ]
    sources = behind(rows, lambda row: few_sources(row, results))
    made = made_with(rows, results)
    html = render("verdicts", ident=f"{own}-table-1", words=WORDS, rows=shown, sources=sources, lines=made)
    return Section(own, "", "Claims", scale, 0, html)


def _details(judgement: Judgement) -> dict[str, str]:
    claim, finding, built_in = judgement.claim, judgement.finding, "no"
    if claim.construction:
        built_in = f"{claim.construction}; if the rule is satisfied, the verdict is {Verdict.BUILT_IN}"
    limits = [
        f"{each.reason} ({each.at_best} at best{'' if each.at_worst is Verdict.NOT else f', {each.at_worst} at worst'})"
        for each in claim.limits
    ]
    return {
        PAPER: str(claim.published),
        "ours": finding.ours,
        "because": finding.reason,
        "claimed": f"{claim.states} ({claim.published.note})" if claim.published.note else claim.states,
        "compared": claim.measure,
        "rule": claim.rule.words,
        "limits": "; ".join(limits) or "none",
        "by construction": built_in,
        "exhibit": f"{', '.join(claim.exhibits)}, {judgement.scale}",
        "setting": judgement.setting,
        **judgement.basis._asdict(),
    }


def page(judgements: Sequence[Judgement], scale: str, command: str) -> str:
    """The page of the documentation, as Markdown, with the command that makes it again."""
    verdicts, claims = tables_of(judgements)
    short = [row._replace(cells=row.cells[:-1]) for row in claims.rows]  # a list follows with the reasons
    return render_page(
        TEMPLATE,
        making=f"python scripts/reproduce.py all --scale {scale} --jobs 2 --record",
        command=command,
        trivial=TRIVIAL,
        sweeps=SWEEPS,
        beyond=f"{rules.BEYOND:g}",
        verdicts=markdown(verdicts),
        claims=markdown(Table(claims.title, COLUMNS[:-1], short)),
        judgements=judgements,
        verdict={each.name: each for each in Verdict},
    )
