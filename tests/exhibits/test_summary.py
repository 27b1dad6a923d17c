"""What a report begins with: who reached what, in how long, and what came of the claims about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.exhibits import base, jobs, tables, tried, unrun
from scripts.exhibits.kinds import trainings
from scripts.exhibits.measures import Curve
from scripts.exhibits.pages import sections, verdicts
from scripts.exhibits.pages import summary as pages_summary
from scripts.exhibits.papers.catalogue import load_all
from tests.support import made_up

CASE = trainings.Case("VGG on CIFAR", ("a=1",), "ResNet on digits")


def exhibit(**changes: Any) -> Any:
    plans = {"smoke": trainings.Plan((CASE,), (), (1, 2, 3), "")}
    methods = {"SparDL": ("b=1",), "dense": trainings.DENSE}
    own = {"name": "paper.training", "proposed": ("SparDL",), "leads": True, **changes}
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


def test_a_line_by_hand(tmp_path: Path) -> None:
    ours, dense = exhibit().tried("smoke", results(tmp_path, {"SparDL": [0.9, 0.91, 0.92], "dense": [0.9] * 3}))
    assert ours.task == "ResNet on digits, for VGG on CIFAR"
    assert ours.measure == "accuracy; target at least 0.891, within 1% of where dense training ends"
    assert ours.metric.startswith("0.91 (0.")
    assert ours.metric.endswith(")")
    assert ours.seconds == "12 s"  # 6, 12 and 18
    assert ours.sent == "2.00%"
    assert (ours.role, dense.role) == ("proposed", "for comparison")
    assert len(set(ours.jobs)) == 3
    assert not set(ours.jobs) & set(dense.jobs)


def test_what_is_missed_or_failed_is_said(tmp_path: Path) -> None:
    ours, dense = exhibit().tried("smoke", results(tmp_path, {"SparDL": [0.9, 0.5, None], "dense": [0.9] * 3}))
    assert (ours.seconds, ours.metric, ours.bad) == ("1 of 2 seeds", "0.7 (2 seeds); 1 of 3 failed", True)
    assert not dense.bad
    found = results(tmp_path / "more", {"SparDL": [0.1, 0.1, 0.1], "dense": [None, 0.9, 0.9]})
    ours, dense = exhibit().tried("smoke", found)
    assert (ours.seconds, ours.measure) == ("no target", "accuracy")  # dense training did not finish
    gone, _ = exhibit().tried("smoke", results(tmp_path / "none", {"SparDL": [None] * 3, "dense": [0.9] * 3}))
    assert (gone.metric, gone.bad) == ("failed: out of memory", True)
    assert exhibit(proposed=()).tried("smoke", found) == []


def test_the_first_evaluation_that_reaches_a_target() -> None:
    curve = Curve((1, 2, 3), (1.0, 2.0, 3.0), (5.0, 3.0, 4.0))
    assert tried.reached(curve, tried.Target(4.0, True, "")) == 2.0
    assert tried.reached(curve, tried.Target(5.0, False, "")) == 1.0
    assert tried.reached(curve, tried.Target(9.0, False, "")) is None


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("reproduced", "good"),
        ("in the same direction", "half"),
        ("checked by construction", "built"),
        ("cannot be judged here: too short", "open"),
        ("not reproduced", "bad"),
        ("depends on the task", "half"),
        ("slightly worse", "half"),
        ("something new", "open"),
    ],
)
def test_a_verdict_has_a_colour_a_mark_and_its_words(words: str, kind: str) -> None:
    found = verdicts.chip(words)
    assert (found.kind, found.words) == (kind, words)
    assert found.mark


def claims(work: list[Any], verdict: str = "not reproduced") -> Any:
    columns = ("claim", "paper (table or figure)", "ours", "exhibit", "verdict")
    cells = [tables.Cell(text) for text in ("the same", "less", "paper.training, smoke", verdict)]
    return tables.Table("Claims", columns, [tables.Row("Paper: accuracy", cells, work)])


def report(folder: Path, made: Any, found: Any, *contents: Any) -> str:
    section = sections.exhibit_section(made, "Paper (2024)", "smoke", found)
    judged = sections.tables_section("claims-smoke", "Claims", "", "smoke", contents, made.basis, found)
    index = sections.add(folder, [judged, section], ["claims-smoke", "paper.training-smoke"])
    return index.read_text()


def test_a_verdict_stands_beside_what_was_proposed(tmp_path: Path) -> None:
    made, found = exhibit(), results(tmp_path, {"SparDL": [0.9] * 3, "dense": [0.9] * 3})
    text = report(tmp_path / "report", made, found, claims(list(found.found)))
    first, rest, folded = text.split('<h2 class="all">')
    # All verdicts counted, those of the paper, and in the table of claims.
    assert first.count("not reproduced") == 3
    assert "no claim is supported" in first
    assert first.index("<nav") < first.index(">Paper: accuracy</th>")
    row = rest[rest.index('<tr class="proposed">') :]
    assert row.index("not reproduced") < row.index(">dense</th>") < row.index("for comparison")
    assert "<img" not in first
    assert rest.count("<img") == 1
    assert "<img" not in folded
    assert 'in <a href="#summary">the summary</a>' in folded
    assert text.count('<details class="exhibit">') == 2


def test_what_failed_stays_with_its_task(tmp_path: Path) -> None:
    made, found = exhibit(), results(tmp_path, {"SparDL": [None] * 3, "dense": [None, 0.9, 0.9]})
    first = report(tmp_path / "report", made, found).split('<h2 class="all">')[1]
    assert first.count('class="task"') == 1
    assert "failed: out of memory" in first


def test_a_verdict_is_only_on_the_rows_of_its_jobs(tmp_path: Path) -> None:
    made, found = exhibit(), results(tmp_path, {"SparDL": [0.9] * 3, "dense": [0.9] * 3})
    work = [made.job(made.plans["smoke"], CASE, "dense", 1)]
    text = report(tmp_path / "report", made, found, claims(work))
    first, rest, _ = text.split('<h2 class="all">')
    assert ">Paper: accuracy</th>" in first
    assert "not reproduced" not in rest


def test_a_row_has_the_verdict_of_its_task(tmp_path: Path) -> None:
    """And not the one that another task gives the claim."""
    made, found = exhibit(), results(tmp_path, {"SparDL": [0.9] * 3, "dense": [0.9] * 3})
    own = tried.marks(list(found.found))
    tasks = [verdicts.Part("this", "reproduced", own), verdicts.Part("another", "not reproduced", ["x"])]
    judged = verdicts.Judged("Paper: accuracy", "same", "-", "depends on the task", ["paper.training"], own, tasks)
    section = sections.exhibit_section(made, "Paper (2024)", "smoke", found)
    claimed = sections.Section("claims-smoke", "", "Claims", "smoke", 0, "", judged=[judged])
    text = str(pages_summary.summary([claimed, section]))
    row = text[text.index('<tr class="proposed">') :]
    assert "\u2713</span> reproduced" in row
    assert "not reproduced" not in row
    assert "depends on the task" not in row


def test_a_paper_s_best_result_is_on_the_first_screen() -> None:
    part = verdicts.Part
    claims = [
        verdicts.Judged("A: counts", "n (Table 1)", "7 of 7", "checked by construction", ["a.x"], []),
        verdicts.Judged(
            "A: order",
            "x > y (Figure 2)",
            "",
            "depends on the task",
            ["a.x"],
            [],
            [part("one", "not reproduced", [], "2, 3"), part("two", "in the same direction", [], "5, 4")],
        ),
        verdicts.Judged("B: speed", "2x (abstract)", "1x", "not reproduced", ["b.x"], []),
    ]
    claimed = sections.Section("claims-smoke", "", "Claims", "smoke", 0, "", judged=claims)
    papers = [sections.Section(f"{name}.x-smoke", name.upper(), "X", "smoke", 0, "") for name in "ab"]
    text = str(pages_summary.summary([claimed, *papers]))
    glance = " ".join(text[text.index('class="stack glance"') :].partition("</table>")[0].split())
    one, other = glance.split("<tr>")[2:]
    assert "in the same direction</span> <strong>order</strong>, two: 5, 4 <small>(paper: x &gt; y)</small>" in one
    assert one.index("checked by construction <b>1</b>") < one.index("depends on the task <b>1</b>")
    assert "not reproduced <b>1</b>" in other
    assert "no claim is supported" in other
    assert verdicts.best_part([]) is None


def test_the_contents_name_papers_and_what_was_not_run(tmp_path: Path) -> None:
    made, found = exhibit(), results(tmp_path, {"SparDL": [], "dense": [0.9] * 3})
    section = sections.exhibit_section(made, "A: Paper (Some, 2024).", "smoke", found)
    judged = verdicts.Judged("A: accuracy", "same", "-", "reproduced", ["paper.training"], [])
    claimed = sections.Section("claims-smoke", "", "Claims", "smoke", 0, "", judged=[judged])
    assert pages_summary.contents([claimed, section]) == [
        ("Claims and verdicts", [("paper-1-claims", "A")]),
        ("Figures and results", [("paper-1", "A")]),
        ("Not run yet", [("unrun", "3 runs, 1 row of unknown time")]),
    ]
    assert pages_summary.contents([]) == []


def test_what_was_not_run_is_in_one_list(tmp_path: Path) -> None:
    made = exhibit()
    found = results(tmp_path, {"SparDL": [], "dense": [0.9] * 3})
    text = report(tmp_path / "report", made, found, claims(list(made.jobs("smoke"))))
    assert text.count(">SparDL</th>") == 0
    listed = text[text.index('<section id="unrun"') : text.index("All exhibits</h2>")]
    assert "3 runs" in listed
    assert "unknown" in listed
    assert "paper.training" in listed
    assert (
        "not reproduced" not in text[text.index("Figures and results</h2>") :].partition('<details class="exhibit">')[0]
    )


def test_the_time_of_what_was_not_run_is_that_of_its_task(tmp_path: Path) -> None:
    made = exhibit()
    found = results(tmp_path, {"SparDL": [0.9], "dense": [0.9] * 3})
    for done in found.found.values():
        done.data["wall_seconds"] = 7200.0
    (waiting,) = unrun.unrun(made, "smoke", found)
    assert (waiting.task, waiting.method, len(waiting.jobs), waiting.seconds) == (CASE.name, "SparDL", 2, 7200.0)
    table = unrun.unrun_table([waiting, waiting])
    assert table is not None
    assert table.title == "Not run yet: 2 runs, 4 core hours"
    assert [cell.text for cell in table.rows[0].cells[:4]] == [CASE.name, "SparDL", "2", "4"]
    assert unrun.unrun_table([]) is None


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


def test_the_target_is_not_a_mean_over_machines(tmp_path: Path) -> None:
    made, found = exhibit(), results(tmp_path, {"SparDL": [0.9] * 3, "dense": [0.9] * 3})
    moved = {
        job: outcome._replace(made={"cpu": "AB"[number % 2]})
        for number, (job, outcome) in enumerate(found.found.items())
    }
    ours, _ = made.tried("smoke", base.Results(tmp_path, moved))
    assert ours.seconds == "12 s (2 seeds on A); 12 s (1 seed on B)"
    assert ours.machine == "A; B"


def test_of_several_scales_the_last_one_counts() -> None:
    page = pages_summary
    kinds = [("smoke", "<svg>small</svg>"), ("laptop", "<svg>large</svg>")]
    made = [sections.Section(f"p.x-{tag}", "Paper", "X", tag, 0, f"<p>{tag}</p>{page.HERE}", svg) for tag, svg in kinds]
    text = str(page.summary(made))
    assert "large" in text
    assert "small" not in text
    small, large = (section.html for section in page.placed(made))
    assert "<svg>small</svg>" in small
    assert "<svg" not in large
    assert page.summary([sections.Section("claims-smoke", "", "Claims", "smoke", 0, "")]) is None


def test_every_paper_has_a_figure_to_lead_with() -> None:
    for paper in load_all():
        assert len([each for each in paper.exhibits if each.leads]) == 1, paper


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
