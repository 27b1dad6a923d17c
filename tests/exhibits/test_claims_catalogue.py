"""All claims: the exhibits they refer to, and the figures they find there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts import choices
from scripts.exhibits import base, tables
from scripts.exhibits import jobs as exhibit_jobs
from scripts.exhibits.claims import base as claims_base
from scripts.exhibits.claims import catalogue as claims_catalogue
from scripts.exhibits.claims import judging
from scripts.exhibits.claims import spardl as spardl_claims
from scripts.exhibits.kinds import lab, predictions, trainings
from scripts.exhibits.papers import catalogue as papers_catalogue
from spardl.basics.errors import WorkerError
from tests.support.claiming import bound, outcome

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("spardl", "oktopk", "study", "dear", "sketch_fusion")


def test_every_claim_refers_to_an_exhibit() -> None:
    known = papers_catalogue.catalogue()
    claims = claims_catalogue.load_all()
    assert {name for each in claims for name in each.exhibits} <= set(known)
    assert len({each.name for each in claims}) == len(claims) >= 28


@pytest.mark.parametrize("part", PARTS)
def test_no_verdict_stands_in_a_declaration(part: str) -> None:
    text = (ROOT / "scripts" / "exhibits" / "claims" / f"{part}.py").read_text()
    verdicts = claims_base.Verdict
    assert "Verdict" not in text
    assert not [each for each in verdicts if str(each) in text.lower()]


def test_the_papers_headlines_are_all_there() -> None:
    published = " ".join(each.published.figure for each in claims_catalogue.load_all())
    for figure in ("4.9x", "1.98x", "6k", "3.29x", "12.95x", "8.83x", "7.71x", "76.3%", "11%", "1.75x", "1.43x"):
        assert figure in published
    for figure in ("83%", "15%", "1.25x", "95%", "18.6%", "2.87x", "GRES > PRES > LRES"):
        assert figure in published


def timed(*names: str) -> Any:
    columns = ("method", lab.TURNS)
    rows = {name: ["2, 2.1, 2"] for name in names}
    return {"sheets": [predictions.sheet("Seconds", columns, rows)]}


def done(job: Any) -> Any:
    """A job's result: that of its work if that takes seconds, else one that looks like it."""
    in_labs = {
        "dear.lab": ("none, after_backward", "none, wfbp", "none, dear"),
        "spardl.lab": ("spardl", "oktopk", "topka", "none"),
    }
    if not hasattr(job, "function"):
        return outcome(0.5)
    data = timed(*in_labs[job.name]) if job.name in in_labs else job.function(**dict(job.arguments))
    return exhibit_jobs.Outcome(Path("run"), data)


def known_with_seeds() -> dict[str, Any]:
    """The exhibits, trained with as many seeds at the smallest scale as an interval needs."""
    kind = trainings.MethodComparison
    known = papers_catalogue.catalogue().items()
    return {name: exhibit.with_seeds(3) if isinstance(exhibit, kind) else exhibit for name, exhibit in known}


def figures_of(claims: Sequence[Any], results: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
    """What each claim finds at the smallest scale, if there is anything."""
    known = known_with_seeds()
    for made in claims:
        try:
            yield made, made.find(known[made.exhibit], "smoke", results, **dict(made.arguments))
        except judging.NoEvidence as missing:
            assert str(missing) == "there are no such figures at this size"
            assert made.exhibit == "oktopk.scaling"


def test_the_fastest_rival_is_named_though_it_wins() -> None:
    """In the lab TopkA took 0.106 s and SparDL 0.115 s: what is published of Ok-Topk is said beside it."""
    seconds = {"spardl": "0.115", "oktopk": "0.4", "topka": "0.106", "none": "0.6", "torch's dense": "0.01"}
    rows = [tables.Row(name, [tables.Cell(", ".join([each] * 3))], []) for name, each in seconds.items()]

    class Lab:
        def jobs(self, scale: str) -> Sequence[Any]:
            return ()

        def tables(self, scale: str, results: Any) -> Sequence[Any]:
            return [tables.Table("T", ("method", lab.TURNS), rows)]

    (found,) = spardl_claims.in_the_lab(Lab(), "laptop", base.Results(Path("x"), {}))
    assert found.name == "4 workers: SparDL against TopkA"
    assert found.remark == "3.478x over Ok-Topk, 5.217x over dense"
    finding = bound("UpTo", 4.9).judge([found])
    assert finding.verdict.name == "NOT"
    assert finding.ours == "0.9217x (4 workers: SparDL against TopkA; 3.478x over Ok-Topk, 5.217x over dense)"


# Comparisons of speed with whoever is fastest. Ok-Topk's with each rival have the fastest as their least ratio.
AGAINST = {
    "SparDL: speed of communication",
    "SparDL: speed of an update",
    "SparDL: speed on a real network",
    "SparDL: fast networks",
    "DeAR: speed on 10 GbE",
    "DeAR: speed on 100 Gbit/s InfiniBand",
    "DeAR: speed on a real network",
    "Sketch-Fusion: training efficiency",
    "Sketch-Fusion: LayerFusion for others",
}


def check(made: Any, found: Sequence[Any]) -> None:
    assert found
    assert all(figure.jobs for figure in found)
    assert all(("against" in figure.name) == (made.name in AGAINST) for figure in found)
    assert len({figure.name for figure in found}) == len(found)
    assert made.rule.judge(found).reason


@pytest.mark.usefixtures("composing")
def test_claims_of_trainings_find_their_figures() -> None:
    """Claims and exhibits fit together: names of methods and cases, and what a summary holds."""
    known = known_with_seeds()
    claims = [
        each for each in claims_catalogue.load_all() if isinstance(known[each.exhibit], trainings.MethodComparison)
    ]
    jobs = {job for each in claims for job in known[each.exhibit].jobs("smoke")}
    results = base.Results(Path("runs"), {job: outcome(0.5) for job in jobs})
    judged = [check(made, found) for made, found in figures_of(claims, results)]
    assert len(judged) == len(claims) >= 7


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_claims_find_their_figures(tmp_path: Path) -> None:
    """Likewise: names of tables, rows and columns, and what counts hold."""
    known, claims = known_with_seeds(), claims_catalogue.load_all()
    jobs = {job for each in claims for job in known[each.exhibit].jobs("smoke")}
    results = base.Results(tmp_path, {job: done(job) for job in jobs})
    with choices.composing():
        found = dict(figures_of(claims, results))
    for made, figures_found in found.items():
        check(made, figures_found)
    # The smallest scale has one model at few workers.
    assert len(claims) - len(found) <= 4


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_nothing_is_judged_without_results(part: str, composing: None, tmp_path: Path) -> None:
    """Which also reads every claim's exhibit at every scale, as far as that goes without results."""
    known, results = known_with_seeds(), claims_catalogue.OnDemand(tmp_path)
    claims = [each for each in claims_catalogue.load_all() if each.exhibit.startswith(f"{part}.")]
    assert claims
    for made in claims:
        found = judging.judge(made, known, "smoke", results)
        assert found.finding.verdict.name == "UNJUDGED"
        assert "not run yet" in found.finding.reason
        assert found.jobs


def test_results_are_looked_up_once(tmp_path: Path) -> None:
    job = exhibit_jobs.Computation("double", abs, (("x", 1),), "echo")
    results = claims_catalogue.OnDemand(tmp_path)
    assert results.of(job).reason == "not run yet"
    job.note(tmp_path, WorkerError("lost"))
    assert results.of(job).reason == "not run yet"
    assert claims_catalogue.OnDemand(tmp_path).of(job).reason == "lost"


METRICS = {"GRES": 0.99, "PRES": 0.98, "LRES": 0.97, "dense": 0.99}


def planned_longer(exhibit: Any) -> Any:
    """The residual rules with 20,000 steps, which are enough at 0.1%."""
    plan = base.at("evening", exhibit.plans)
    return replace(exhibit, plans={"evening": replace(plan, sparse=(*plan.sparse, "training.max_steps=20000"))})


@pytest.mark.usefixtures("composing")
def test_cases_that_are_too_short_by_plan_are_not_needed() -> None:
    """Residual rules are judged at 1%, whatever there is at 0.1%."""
    exhibit: Any = papers_catalogue.catalogue()["spardl.residuals"]
    found = {
        job: outcome(METRICS[job.labels.job_type], steps=1000)
        for job in exhibit.jobs("evening")
        if "digits, 1%" in job.labels.tags[0]
    }
    figures = spardl_claims.residuals(exhibit, "evening", base.Results(Path("x"), found))
    assert [(figure.name, figure.values[0]) for figure in figures] == [("GRES", 0.99), ("PRES", 0.98), ("LRES", 0.97)]
    assert not any(figure.hindrances for figure in figures)


@pytest.mark.usefixtures("composing")
def test_learning_rate_is_chosen_on_a_trained_baseline() -> None:
    exhibit = planned_longer(papers_catalogue.catalogue()["spardl.residuals"])

    def residuals(*bad: str) -> Any:
        """Cases that are bad have higher metrics, and a dense baseline that has not converged."""
        found = {}
        for job in exhibit.jobs("evening"):
            name, hit = job.labels.job_type, any(case in job.labels.tags[0] for case in bad)
            better = -0.1 if name == "dense" else 0.005
            penalty = 0.02 if "rate 0.05," in job.labels.tags[0] and not hit else 0
            value = METRICS[name] - (penalty if name != "dense" else 0) + (better if hit else 0)
            found[job] = outcome(value, steps=20_000)
        return spardl_claims.residuals(exhibit, "evening", base.Results(Path("x"), found))

    for bad in ((), ("rate 0.01,",)):
        figures = residuals(*bad)
        assert [(figure.name, figure.values) for figure in figures] == [
            (name, [METRICS[name]] * 5) for name in ("GRES", "PRES", "LRES")
        ] * 2
        assert [figure.task for figure in figures[::3]] == [
            "ResNet-20 on digits, 1%, 1,000 steps",
            "ResNet-20 on digits, 8 workers, 0.1%, 900 steps",
        ]
        assert not any(figure.hindrances for figure in figures)
    nowhere = residuals("digits, 1%", "rate 0.01,", "rate 0.02,", "rate 0.05,")
    assert all("the dense baseline reached only 0.89" in " ".join(figure.hindrances) for figure in nowhere)
