"""All claims: the exhibits they refer to, the figures they find there, the page, and the script that writes it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape

from scripts import choices
from scripts.exhibits import base, jobs
from scripts.exhibits.catalogue import catalogue as exhibits
from scripts.exhibits.claims import catalogue, judging, rules
from scripts.exhibits.claims import figures as found_in
from scripts.exhibits.kinds import lab, predictions, trainings
from spardl.basics.errors import WorkerError
from tests.support.claiming import claim, figures, judged, outcome, rule

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = catalogue.load_all()
HEADLINES = "4.9x 1.98x 6k 3.29x 12.95x 8.83x 7.71x 76.3% 11% 1.75x 1.43x 83% 15% 1.25x 95% 18.6% 2.87x GRES"
SPEED = re.compile(r"(SparDL|Ok-Topk|DeAR): (speed|fast)|Sketch-Fusion: (t|L)")


def test_every_claim_refers_to_an_exhibit_and_says_what_figures_include() -> None:
    assert {name for each in CLAIMS for name in each.exhibits} <= set(exhibits())
    assert len({each.name for each in CLAIMS}) == len(CLAIMS) >= 28
    headlines = " ".join(each.published.figure for each in CLAIMS)
    assert all(figure in headlines for figure in HEADLINES.split())
    published = [each for each in CLAIMS if SPEED.match(each.name)]
    assert len(published) == 12
    assert all("the cost of the published code" in each.remark for each in published)
    assert {each.name for each in CLAIMS if each.construction} == {
        "SparDL: any number of workers",
        "SparDL: teams save rounds",
        "DeAR: no extra communication",
        "DeAR: what overlap alone can gain",
        "Sketch-Fusion: training efficiency",
        "Sketch-Fusion: LayerFusion for others",
    }


def done(job: Any) -> Any:
    """A job's result: that of its work if that takes seconds, else one that looks like it."""
    in_labs = {
        "dear.lab": ("none, after_backward", "none, wfbp", "none, dear"),
        "spardl.lab": ("spardl", "oktopk", "topka", "none"),
    }
    if not hasattr(job, "function"):
        return outcome(0.5)
    if job.name not in in_labs:
        return jobs.Outcome(Path("run"), job.function(**dict(job.arguments)))
    rows = {name: ["2, 2.1, 2"] for name in in_labs[job.name]}
    return jobs.Outcome(Path("run"), {"sheets": [predictions.sheet("Seconds", ("method", lab.TURNS), rows)]})


def known_with_seeds() -> dict[str, Any]:
    """The exhibits, trained with as many seeds at the smallest scale as an interval needs."""
    kind = trainings.MethodComparison
    return {name: each.with_seeds(3) if isinstance(each, kind) else each for name, each in exhibits().items()}


def figures_of(claims: Sequence[Any], results: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
    """What each claim finds at the smallest scale, if there is anything."""
    known = known_with_seeds()
    for made in claims:
        try:
            yield made, made.find(known[made.exhibit], "smoke", results, **dict(made.arguments))
        except judging.NoEvidence as missing:
            assert str(missing) == "there are no such figures at this size"
            assert made.exhibit == "oktopk.scaling"


def check(made: Any, found: Sequence[Any]) -> None:
    """Comparisons of speed name the fastest rival. Ok-Topk's with each rival have the fastest as their least ratio."""
    against = SPEED.match(made.name) and not made.name.startswith("Ok-Topk")
    assert found
    assert all(figure.jobs for figure in found)
    assert all(("against" in figure.name) == bool(against) for figure in found)
    assert len({figure.name for figure in found}) == len(found)
    assert made.rule.judge(found).reason


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_claims_find_their_figures(tmp_path: Path) -> None:
    """Names of tables, rows and columns, and what counts hold."""
    known = known_with_seeds()
    work = {job for each in CLAIMS for job in known[each.exhibit].jobs("smoke")}
    results = base.Results(tmp_path, {job: done(job) for job in work})
    with choices.composing():
        found = dict(figures_of(CLAIMS, results))
    for made, figures_found in found.items():
        check(made, figures_found)
    # The smallest scale has one model at few workers.
    assert len(CLAIMS) - len(found) <= 4


@pytest.mark.slow
def test_nothing_is_judged_without_results(composing: None, tmp_path: Path) -> None:
    """Which also reads every claim's exhibit at every scale, as far as that goes without results."""
    known, results = known_with_seeds(), catalogue.OnDemand(tmp_path)
    for made in CLAIMS:
        found = judging.judge(made, known, "smoke", results)
        assert found.finding.verdict.name == "UNJUDGED"
        assert "not run yet" in found.finding.reason
        assert found.jobs


def test_results_are_looked_up_once(tmp_path: Path) -> None:
    job = jobs.Computation("double", abs, (("x", 1),), "echo")
    results = catalogue.OnDemand(tmp_path)
    assert results.of(job).reason == "not run yet"
    job.note(tmp_path, WorkerError("lost"))
    assert results.of(job).reason == "not run yet"
    assert catalogue.OnDemand(tmp_path).of(job).reason == "lost"


METRICS = {"GRES": 0.99, "PRES": 0.98, "LRES": 0.97, "dense": 0.99}


def residuals(exhibit: Any, value: Any) -> Any:
    """What is found of trainings with a metric by job, as long as planned; without those that have none."""
    found = {job: value(job) for job in exhibit.jobs("evening") if value(job) is not None}
    return found_in.residuals(exhibit, "evening", base.Results(Path("x"), found))


@pytest.mark.usefixtures("composing")
def test_cases_that_are_too_short_by_plan_are_not_needed() -> None:
    """Residual rules are judged at 1%, whatever there is at 0.1%."""

    def value(job: Any) -> Any:
        return outcome(METRICS[job.labels.job_type], steps=1000) if "digits, 1%" in job.labels.tags[0] else None

    found = residuals(exhibits()["spardl.residuals"], value)
    assert [(figure.name, figure.values[0]) for figure in found] == [("GRES", 0.99), ("PRES", 0.98), ("LRES", 0.97)]
    assert not any(figure.hindrances for figure in found)


@pytest.mark.usefixtures("composing")
def test_learning_rate_is_chosen_on_a_trained_baseline() -> None:
    exhibit: Any = exhibits()["spardl.residuals"]
    plan = base.at("evening", exhibit.plans)  # with 20,000 steps, which are enough at 0.1%
    plan = replace(plan, sparse=(*plan.sparse, "training.max_steps=20000"))
    exhibit = replace(exhibit, plans={"evening": plan})

    def found(*bad: str) -> Any:
        """Cases that are bad have higher metrics, and a dense baseline that has not converged."""

        def value(job: Any) -> Any:
            name, hit = job.labels.job_type, any(case in job.labels.tags[0] for case in bad)
            better = -0.1 if name == "dense" else 0.005
            penalty = 0.02 if "rate 0.05," in job.labels.tags[0] and not hit else 0
            return outcome(METRICS[name] - (penalty if name != "dense" else 0) + (better if hit else 0), steps=20_000)

        return residuals(exhibit, value)

    for bad in ((), ("rate 0.01,",)):
        chosen = found(*bad)
        assert [(figure.name, figure.values) for figure in chosen] == [
            (name, [METRICS[name]] * 5) for name in ("GRES", "PRES", "LRES")
        ] * 2
        assert [figure.task for figure in chosen[::3]] == [
            "ResNet-20 on digits, 1%, 1,000 steps",
            "ResNet-20 on digits, 8 workers, 0.1%, 900 steps",
        ]
        assert not any(figure.hindrances for figure in chosen)
    nowhere = found("digits, 1%", "rate 0.01,", "rate 0.02,", "rate 0.05,")
    assert all("the dense baseline reached only 0.89" in " ".join(figure.hindrances) for figure in nowhere)


def made(value: float, *words: Any) -> Any:
    return judged(claim(rule("UpTo", 2.0), lambda *_: figures(value), *words))


def test_the_tables_count_and_mark() -> None:
    summary, table = catalogue.tables_of([made(0.5)])
    counts = {row.name: row.cells[0].value for row in summary.rows}
    assert counts == {**dict.fromkeys(map(str, judging.Verdict), 0), "not reproduced": 1}
    cells = dict(zip(table.columns[1:], table.rows[0].cells, strict=True))
    assert cells["verdict"] == ("not reproduced", None, True)
    assert cells["ours"].text == "0.5x (a)"
    assert cells["paper (table or figure)"].text == (
        "much (table or figure number unknown; from memory, low certainty)"
    )


def test_page_and_report_tell_what_a_verdict_rests_on() -> None:
    judgement = made(3.0, [judging.Limit.LAB], "it holds its rivals")
    page = catalogue.page([judgement], "laptop", "python the_command.py")
    for words in (
        "python scripts/reproduce.py all --scale laptop --jobs 2 --record\npython the_command.py\n```\n",
        "| reproduced | 0 | - |",
        "| checked by construction, overshoot | 1 | X: name |",
        "| X: name | much (table or figure number unknown; from memory, low certainty) | 3x (a) | checked by cons",
        "\n## Why\n\n* **X: name**: far beyond the published figure",
        "judged only after at least 10/density synchronizations",
    ):
        assert words in page
    html = catalogue.claims_section([judgement], "laptop", base.Results(Path("runs"), {})).html
    assert "<table" not in html  # claims fold out; how many there are of each verdict, the summary says
    for name, words in {
        "claimed": "It is so. (a note)",
        "compared": "seconds",
        "rule": rules.UpTo(2.0).words,
        "limits": f"{judging.Limit.LAB.reason} (in the same direction at best, cannot be judged here at worst)",
        "by construction": "it holds its rivals; if the rule is satisfied, the verdict is checked by construction",
        "exhibit": "x.y, laptop",
        "simulated": "nothing: it ran",
        "assumed": "a < b",
    }.items():
        assert f"<dt>{name}</dt><dd>{escape(words)}</dd>" in html


def test_the_page_in_the_docs_names_every_claim() -> None:
    page = (ROOT / "docs" / "tables" / "claims.md").read_text()
    names = [each.name for each in CLAIMS]
    table, _, reasons = page.partition("## Claim by claim")[2].partition("## Why")
    assert re.findall(r"^\| (.*?) \|", table, re.MULTILINE)[2:] == names
    assert re.findall(r"^\* \*\*(.*?)\*\*: .", reasons, re.MULTILINE) == names
