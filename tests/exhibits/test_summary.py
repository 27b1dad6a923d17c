"""What a report begins with: who reached what, in how long, and what came of the claims about it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts import reproduce
from scripts.exhibits import base, jobs, measures, pages
from scripts.exhibits.catalogue import load_all
from scripts.exhibits.claims.judging import Finding, TaskFinding, Verdict
from scripts.exhibits.kinds import trainings
from scripts.exhibits.measures import Curve
from tests.support import claiming, made_up

CASE = trainings.Case("VGG on CIFAR", ("a=1",), "ResNet on digits")


def exhibit(**changes: Any) -> Any:
    plans = {"smoke": trainings.Plan((CASE,), (), (1, 2, 3), "")}
    methods = {"SparDL": ("b=1",), "dense": trainings.DENSE}
    own = {"name": "paper.training", "leads": True, **changes}
    return trainings.MethodComparison(
        title="Training", source="", shows="", basis=base.Basis("", "", ""), methods=methods, plans=plans, **own
    )


def results(folder: Path, metrics: dict[str, list[float | None]], made: Any = None) -> Any:
    """Trainings of three evaluations, of which the last is the metric; ``None`` failed."""
    made = made or exhibit()
    found = {}
    for method, values in metrics.items():
        for seed, value in enumerate(values, 1):
            job = made.job(made.plans["smoke"], CASE, method, seed)
            if value is None:
                found[job] = jobs.Outcome(folder, {}, "out of memory")
                continue
            where = folder / method / str(seed)
            where.mkdir(parents=True)
            lines = [f'{{"kind": "eval", "step": {step}, "accuracy": {value * step / 3}}}\n' for step in (1, 2, 3)]
            (where / "metrics.jsonl").write_text("".join(lines))
            sizes = {"steps": 3, "cluster_seconds": 6.0 * seed, "step_bytes": 2.0, "step_bytes_dense": 100.0}
            found[job] = jobs.Outcome(where, {"metric": "accuracy", "final": {"accuracy": value}, **sizes})
    return base.Results(folder, found)


def test_the_first_evaluation_that_reaches_a_target() -> None:
    curve = Curve((1, 2, 3), (1.0, 2.0, 3.0), (5.0, 3.0, 4.0))
    assert measures.reached(curve, measures.Target(4.0, True, "")) == 2.0
    assert measures.reached(curve, measures.Target(5.0, False, "")) == 1.0
    assert measures.reached(curve, measures.Target(9.0, False, "")) is None


@pytest.mark.parametrize("verdict", Verdict)
def test_every_verdict_has_a_colour_a_mark_and_its_words(verdict: Verdict) -> None:
    kind, mark, words = pages.chip(Finding(verdict, "", "", overshoot=True))
    assert kind in pages.STYLE.read_text()
    assert mark
    assert words == f"{verdict}, overshoot"


def judgement(verdict: str, *tasks: Any, **words: Any) -> Any:
    """A verdict on the claim of an exhibit."""
    name, exhibit, ours = words.get("name", "A: claim"), words.get("exhibit", "paper.training"), words.get("ours", "1x")
    claim = replace(claiming.claim(claiming.rule("UpTo", 2.0), list), name=name, exhibit=exhibit)
    finding = Finding(Verdict[verdict], ours, "so")
    return claiming.judging.Judgement(claim, finding, "smoke", "", base.Basis("", "", ""), (), tasks)


def task(name: str, verdict: str, ours: str) -> Any:
    return TaskFinding(name, Finding(Verdict[verdict], ours, ""), ())


def report(folder: Path, made: Any, found: Any, *judgements: Any, monkeypatch: Any) -> list[str]:
    """The parts of a report: claims, figures and results, and exhibits."""
    monkeypatch.setattr(reproduce, "papers", lambda: {made.name: "A: Paper (Some, 2024)."})
    waiting = pages.unrun_table([made], "smoke", found)
    text = reproduce.report([made], "smoke", found, folder, judgements, [waiting] if waiting else []).read_text()
    return text.split('<h2 class="all">')


def test_claims_come_before_figures_and_folded_exhibits(tmp_path: Path, monkeypatch: Any) -> None:
    made, found = exhibit(), results(tmp_path, {"SparDL": [0.9] * 3, "dense": [0.9] * 3})
    claim = judgement("NOT")
    first, rest, folded = report(tmp_path, made, found, claim, monkeypatch=monkeypatch)
    assert first.count("not reproduced") == 3  # in all verdicts counted, those of the paper, and the table of claims
    assert "no claim is supported" in first
    assert first.index("<nav") < first.index(">A: claim</th>")
    assert [part.count("<img") for part in (first, rest, folded)] == [0, 1, 0]
    assert 'in <a href="#summary">the summary</a>' in folded
    assert folded.count('<details class="exhibit">') == 2
    assert "<dt>because</dt><dd>so</dd>" in folded


def test_a_paper_s_best_result_is_on_the_first_screen() -> None:
    claims = [
        judgement("BUILT_IN", name="A: counts", exhibit="a.x"),
        judgement(
            "MIXED",
            task("one", "NOT", "2, 3"),
            task("two", "DIRECTION", "5, 4"),
            name="A: order",
            exhibit="a.x",
        ),
        judgement("NOT", name="B: speed", exhibit="b.x"),
    ]
    papers = [pages.Section(f"{name}.x-smoke", name.upper(), "X", "smoke", 0, "", f"{name}.x") for name in "ab"]
    text = str(pages.summary(papers, claims, [])[0])
    glance = " ".join(text[text.index('class="stack glance"') :].partition("</table>")[0].split())
    one, other = glance.split("<tr>")[2:]
    assert "in the same direction</span> <strong>order</strong>, two: 5, 4 <small>(paper: much)</small>" in one
    assert one.index("checked by construction <b>1</b>") < one.index("depends on the task <b>1</b>")
    assert "not reproduced <b>1</b>" in other
    assert "no claim is supported" in other
    assert pages.summary([], [], []) == (None, [])


def test_what_was_not_run_is_in_one_list(tmp_path: Path, monkeypatch: Any) -> None:
    made, found = exhibit(), results(tmp_path, {"SparDL": [], "dense": [0.9] * 3})
    claim = judgement("NOT")
    first, _, listed, _ = report(tmp_path, made, found, claim, monkeypatch=monkeypatch)
    for key, title in (
        ("paper-1-claims", "A"),
        ("paper-1", "A"),
        ("unrun-1", "Not run yet: 3 runs, 1 row of unknown time"),
    ):
        assert f'<a href="#{key}">{title}</a>' in first
    assert ">SparDL</th>" not in listed
    assert "paper.training" in listed
    assert "unknown" in listed


def test_the_time_of_what_was_not_run_is_that_of_its_task(tmp_path: Path) -> None:
    made = exhibit()
    found = results(tmp_path, {"SparDL": [0.9], "dense": [0.9] * 3})
    for done in found.found.values():
        done.data["wall_seconds"] = 7200.0
    table = pages.unrun_table([made, made], "smoke", found)
    assert table is not None
    assert table.title == "Not run yet: 2 runs, 4 core hours"
    assert [cell.text for cell in table.rows[0].cells[:4]] == [CASE.name, "SparDL", "2", "4"]
    assert pages.unrun_table([], "smoke", found) is None


def machines(folder: Path, *names: str) -> Any:
    """A table of SparDL and dense training, whose trainings ran on these machines."""
    made, found = exhibit(), results(folder, {"SparDL": [0.9] * 3, "dense": [0.9] * 3})
    outcomes = zip(found.found.items(), names, strict=True)
    moved = {job: outcome._replace(made={"cpu": name, "torch": "2.7+x"}) for (job, outcome), name in outcomes}
    (table,) = made.tables("smoke", base.Results(folder, moved))
    return [[cell.text for cell in row.cells[-3:]] for row in table.rows]


def test_seconds_are_compared_within_one_machine(tmp_path: Path) -> None:
    assert machines(tmp_path / "one", *"AAAAAA") == [["12", "1", "A, torch 2.7"], ["12", "1", "A, torch 2.7"]]
    other = machines(tmp_path / "two", *"AAABBB")
    assert other[1] == ["12", "other machine", "B, torch 2.7"]
    mixed = machines(tmp_path / "mixed", *"ABAAAB")
    assert mixed[0] == ["12; 12", "1", "A, torch 2.7; B, torch 2.7"]
    assert mixed[1] == ["9; 18", "0.75", "A, torch 2.7; B, torch 2.7"]


def test_a_paper_s_first_figure_has_a_panel_for_each_task(tmp_path: Path) -> None:
    for paper in load_all():
        (leading,) = [each for each in paper.exhibits if each.leads]
        pictures = leading.pictures("laptop", made_up.results(leading, "laptop", tmp_path))
        assert pictures
        if leading.name.endswith("convergence"):
            assert len({picture.caption for picture in pictures}) == 1
            tasks = dict.fromkeys(picture.title.partition(" (1 of ")[0].partition(" (2 of ")[0] for picture in pictures)
            assert list(tasks) == [case.title for case in leading.plans["laptop"].cases]


def test_no_panel_of_curves_has_more_than_five(tmp_path: Path) -> None:
    for paper in load_all():
        for each in paper.exhibits:
            if isinstance(each, trainings.MethodComparison):
                pictures = each.pictures("smoke", made_up.results(each, "smoke", tmp_path / each.name))
                assert all(len(picture.key) <= 5 for picture in pictures)
                shown = {name for picture in pictures for name in picture.key}
                assert not shown or shown == set(each.compared(base.at("smoke", each.plans)))
