"""Claims: what they find, results that are missing or failed, and limits."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.exhibits import base, measures, tables
from scripts.exhibits import jobs as exhibit_jobs
from scripts.exhibits.claims import base as claims_base
from scripts.exhibits.claims import catalogue as claims_catalogue
from scripts.exhibits.claims import evidence, judging
from scripts.exhibits.kinds import lab, trainings
from tests.support.claiming import DIGITS, LONG, bound, claim, exhibit_of, figures, judged, outcome, seeded

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("spardl", "oktopk", "study", "dear", "sketch_fusion")


def accuracies(exhibit: Any, scale: str, results: Any) -> Any:
    return evidence.metrics(exhibit, scale, results, "one", "two")


@pytest.mark.usefixtures("composing")
def test_a_claim_is_judged_by_its_results() -> None:
    found = judged(claim(seeded("NoLoss"), accuracies), found=[outcome(value) for value in (0.9, 0.8, 0.7) * 2])
    assert found.finding.verdict.name == "REPRODUCED"
    assert found.finding.ours == "a small network on digits, for VGG on CIFAR: 0%"
    assert len(found.jobs) == 6
    lower = [outcome(value, metric="wer") for value in (0.9, 0.8, 0.7, 0.5, 0.4, 0.3)]
    assert judged(claim(seeded("NoLoss"), accuracies), found=lower).finding.verdict.name == "NOT"


GOOD, BAD = (0.8, 0.9, 0.8), (0.2, 0.3, 0.2)


@pytest.mark.usefixtures("composing")
@pytest.mark.parametrize(
    ("ours", "dense", "steps", "reason"),
    [
        (
            BAD,
            GOOD,
            LONG - 1,
            "too short: 199 steps where 200 are needed (a small network on digits, for VGG on CIFAR)",
        ),
        (GOOD, GOOD, 20, "too short: 20 steps where 200 are needed (a small network on digits, for VGG on CIFAR)"),
        (BAD, BAD, LONG, "the dense baseline reached only 0.2333; reference 0.5 (a book) (a small network"),
        (
            BAD,
            BAD,
            20,
            "too short: 20 steps where 200 are needed (a small network on digits, for VGG on CIFAR); the den",
        ),
    ],
)
def test_short_trainings_and_bad_twins_say_nothing_of_accuracy(ours: Any, dense: Any, steps: int, reason: str) -> None:
    """Neither a good figure nor a bad one."""
    found = [outcome(value, steps=steps) for value in (*ours, *dense)]
    finding = judged(claim(seeded("NoLoss"), accuracies), found=found).finding
    assert finding.verdict.name == "UNJUDGED"
    assert finding.reason.startswith(reason)
    enough = [outcome(value) for value in (*ours, *GOOD)]
    assert judged(claim(seeded("NoLoss"), accuracies), found=enough).finding.verdict.name != "UNJUDGED"


@pytest.mark.usefixtures("composing")
def test_a_baseline_that_overfits_is_no_baseline() -> None:
    """A method that learns less also overfits less, and seems to be better."""
    found = [outcome(value) for value in (*GOOD, *BAD)]
    for each in found[3:]:
        each.data["best"] = 0.9
    finding = judged(claim(seeded("NoLoss"), accuracies), found=found).finding
    assert finding.verdict.name == "UNJUDGED"
    said = "the dense baseline overfits: 0.2333 at the end, 0.9 before; reference 0.5 (a book)"
    assert finding.reason.startswith(said)


@pytest.mark.parametrize(
    ("values", "tolerance", "reached"),
    [
        ((0.51, 0.52, 0.5), 0.0, True),
        ((0.49, 0.495, 0.505), 0.0, True),  # below, but the interval of the seeds contains the reference
        ((0.48, 0.481, 0.482), 0.0, False),
        ((0.4951, 0.4951, 0.4951), 0.005, True),  # half a unit of the last digit that the source states
        ((0.4949, 0.4949, 0.4949), 0.005, False),
        ((0.499,), 0.0, False),  # one seed has no interval
        ((float("nan"), 0.6, 0.6), 0.0, False),
    ],
)
def test_a_reference_is_reached_within_the_interval(values: Any, tolerance: float, reached: bool) -> None:
    known = trainings.Known(0.5, "a book", tolerance)
    assert known.reached(values, higher=True) == reached
    mirrored = trainings.Known(-0.5, "a book", tolerance)
    assert mirrored.reached([-value for value in values], higher=False) == reached


OTHER = replace(DIGITS, words=("cluster.workers=3",), name="BERT", what="a small one")


@pytest.mark.usefixtures("composing")
def test_every_task_has_its_own_verdict() -> None:
    """One claim's verdict says nothing about the single task; support and failure together depend on the task."""
    found = [outcome(value) for value in (*BAD, *GOOD, *GOOD, *GOOD)]
    judgement = judged(claim(seeded("NoLoss"), accuracies), found=found, exhibit=exhibit_of(DIGITS, OTHER))
    assert [(task.task, task.finding.verdict.name) for task in judgement.tasks] == [
        ("a small network on digits, for VGG on CIFAR", "NOT"),
        ("a small one, for BERT", "REPRODUCED"),
    ]
    assert all(len(task.jobs) == 6 for task in judgement.tasks)
    assert judgement.finding.label == "depends on the task"
    assert "for VGG on CIFAR: worse by" in judgement.finding.reason
    assert "for BERT: no loss" in judgement.finding.reason
    assert judgement.finding.ours.endswith("a small one, for BERT: 0%: reproduced")
    limited = replace(claim(seeded("NoLoss"), accuracies), limits=(judging.STAND_INS,))
    judgement = judged(limited, found=found, exhibit=exhibit_of(DIGITS, OTHER))
    assert judgement.finding.ours.endswith("a small one, for BERT: 0%: in the same direction")  # as in its own row


@pytest.mark.usefixtures("composing")
def test_a_claim_has_tasks_of_several_exhibits() -> None:
    first, second = exhibit_of(DIGITS), replace(exhibit_of(OTHER), name="x.z")
    made = replace(claim(seeded("NoLoss"), accuracies), also=("x.z",))
    jobs = [*first.jobs("laptop"), *second.jobs("laptop")]
    results = base.Results(Path("runs"), dict(zip(jobs, [outcome(value) for value in GOOD * 4], strict=True)))
    whole = judging.judge(made, {"x.y": first, "x.z": second}, "laptop", results)
    assert [task.finding.verdict.name for task in whole.tasks] == ["REPRODUCED", "REPRODUCED"]
    half = base.Results(Path("runs"), dict(list(results.found.items())[:6]))
    kept = judging.judge(made, {"x.y": first, "x.z": second}, "laptop", half)
    assert [task.finding.verdict.name for task in kept.tasks] == ["REPRODUCED"]  # what was not run has no verdict
    lost = dict.fromkeys(second.jobs("laptop"), exhibit_jobs.Outcome(Path("runs"), {}, "out of memory"))
    failed = judging.judge(
        made, {"x.y": first, "x.z": second}, "laptop", base.Results(Path("runs"), {**half.found, **lost})
    )
    assert [task.finding.verdict.name for task in failed.tasks] == ["REPRODUCED", "UNJUDGED"]
    assert kept.finding.verdict.name == "DIRECTION"
    assert "not judged: 6 of 6 required results are missing: not run yet (T)" in kept.finding.reason
    none = judging.judge(made, {"x.y": first, "x.z": second}, "laptop", base.Results(Path("runs"), {}))
    assert (none.finding.verdict.name, none.finding.ours, none.tasks, len(none.jobs)) == ("UNJUDGED", "-", (), 12)


@pytest.mark.usefixtures("composing")
def test_seconds_of_several_machines_are_not_judged() -> None:
    found = [outcome(value)._replace(made={"cpu": cpu}) for value, cpu in zip(GOOD * 2, "AAAABB", strict=True)]
    exhibit = exhibit_of(DIGITS)
    results = base.Results(Path("runs"), dict(zip(exhibit.jobs("laptop"), found, strict=True)))
    with pytest.raises(judging.NoEvidence, match="seconds of different machines do not compare: A; B"):
        evidence.timed(exhibit, "laptop", results, ("one", "two"))
    assert evidence.timed(exhibit, "laptop", results, ("one",))


@pytest.mark.usefixtures("composing")
def test_dense_steps_at_the_start_do_not_count() -> None:
    case = replace(DIGITS, words=(*DIGITS.words, "warmup.steps=1"))
    made, found = claim(seeded("NoLoss"), accuracies), [outcome(value) for value in GOOD * 2]
    assert judged(made, found=found, exhibit=exhibit_of(case)).finding.reason.startswith("too short: 199 steps")


@pytest.mark.usefixtures("composing")
def test_what_nothing_is_known_of_is_left_out_and_named() -> None:
    unknown = replace(DIGITS, words=("cluster.workers=3",), name="BERT", what="a small one", known=None)
    made = claim(seeded("NoLoss"), accuracies)
    one = judged(made, found=[outcome(value) for value in GOOD * 2], exhibit=exhibit_of(unknown)).finding
    assert one.verdict.name == "UNJUDGED"
    assert one.reason == "no reference value of dense training is known for this task (a small one, for BERT)"
    both = exhibit_of(DIGITS, unknown)
    kept = judged(made, found=[outcome(value) for value in (*GOOD, *GOOD, *BAD, *GOOD)], exhibit=both).finding
    assert kept.verdict.name == "DIRECTION"  # not all cases were judged
    assert "not judged: no reference value of dense training" in kept.reason
    worse = judged(made, found=[outcome(value) for value in (*BAD, *GOOD, *GOOD, *GOOD)], exhibit=both).finding
    assert worse.verdict.name == "NOT"


@pytest.mark.parametrize(("alone", "passes"), [((0.9, 0.91, 0.92), True), ((0.6, 0.61, 0.62), False)])
def test_what_one_worker_alone_reaches_is_told(alone: tuple[float, ...], passes: bool) -> None:
    """Where it passes the same test, a method that passes has only done no harm."""
    (ours,) = figures((0.9, 0.91, 0.92), against=[(0.9, 0.91, 0.92)])
    without, beside = (seeded("NoLoss").judge([each]) for each in (ours, ours._replace(floor=alone)))
    assert beside.verdict is without.verdict
    assert "single worker" not in without.reason
    assert ("it passes the same test" in beside.reason) == passes
    assert f"single worker without communication: {'0%' if passes else '-32.97%'}" in beside.reason


@pytest.mark.usefixtures("composing")
def test_the_floor_is_that_of_the_exhibit() -> None:
    whole = exhibit_of(DIGITS)
    exhibit = replace(whole, methods={**whole.methods, "alone": trainings.ALONE})
    made = claim(seeded("NoLoss"), accuracies)
    kept = judged(made, found=[outcome(value) for value in GOOD * 3], exhibit=exhibit).finding
    assert "single worker without communication: 0%; it passes" in kept.reason
    lost = judged(made, found=[outcome(value) for value in (*GOOD, *GOOD)], exhibit=exhibit).finding
    assert lost.reason == "3 of 9 required results are missing: not run yet"


@pytest.mark.usefixtures("composing")
def test_a_case_that_waits_is_named_and_keeps_no_other_back() -> None:
    other = replace(DIGITS, words=("cluster.workers=3",), name="BERT", what="a small one")
    made = claim(seeded("NoLoss"), lambda *words: evidence.metrics_so_far(*words, "one", "two"))
    both = exhibit_of(DIGITS, other)
    missing = "3 of 6 required results are missing: not run yet"
    kept = judged(made, found=[outcome(value) for value in GOOD * 3], exhibit=both)
    assert kept.finding.verdict.name == "DIRECTION"
    assert f"not judged: {missing} (a small one, for BERT)" in kept.finding.reason
    assert len(kept.jobs) == 12
    short = [outcome(value, steps=LONG - 1) for value in GOOD * 3]
    assert judged(made, found=short, exhibit=both).finding.verdict.name == "UNJUDGED"
    none = judged(made, exhibit=both)
    assert (none.finding.verdict.name, none.finding.ours, len(none.jobs)) == ("UNJUDGED", "-", 12)
    assert none.finding.reason.startswith("a small network on digits, for VGG on CIFAR: 6 of 6 required")


@pytest.mark.usefixtures("composing")
def test_an_order_needs_all_its_trainings() -> None:
    """One that is too short spoils it: there are no cases to be left out."""

    def order(exhibit: Any, scale: str, results: Any) -> Any:
        (found,) = evidence.accuracies(exhibit, scale, results, ("two", "one")).values()
        return list(found.values())

    long, short = ([outcome(value, steps=steps) for value in (*BAD, *GOOD)] for steps in (LONG, LONG - 1))
    assert judged(claim(seeded("Order"), order), found=long).finding.verdict.name == "REPRODUCED"
    finding = judged(claim(seeded("Order"), order), found=short).finding
    assert (finding.verdict.name, finding.reason) == ("UNJUDGED", "too short: 199 steps where 200 are needed (one)")


def test_accuracy_needs_a_dense_baseline() -> None:
    alone = replace(exhibit_of(DIGITS), methods={"one": ("compressor=topka",)})
    with pytest.raises(KeyError, match="has no dense training"):
        assert alone.dense_names


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([], "6 of 6 required results are missing: not run yet"),
        ([0.9] * 5, "1 of 6 required results are missing: not run yet"),
        ([0.9, "out of memory", *[0.9] * 3], "2 of 6 required results are missing: out of memory; not run yet"),
        ([*[0.9] * 5, float("nan")], "1 of 6 trainings ended without a finite number"),
    ],
)
def test_what_is_missing_or_failed_is_not_judged(values: list[Any], reason: str) -> None:
    found = [outcome(0, value) if isinstance(value, str) else outcome(value) for value in values]
    judgement = judged(claim(seeded("NoLoss"), accuracies), found=found)
    assert judgement.finding.verdict.name == "UNJUDGED"
    assert judgement.finding.reason == reason
    assert judgement.finding.ours == "-"
    assert len(judgement.jobs) == 6


def test_limits_lower_a_verdict_and_say_why() -> None:
    verdicts = claims_base.Verdict
    limits = [judging.Limit("it is small", verdicts.DIRECTION, ("laptop",)), judging.MODELLED]

    def speed(value: float) -> Any:
        return claim(bound("UpTo", 2.0), lambda *_: figures(value), limits)

    capped = judged(speed(2.5)).finding
    assert capped.verdict is verdicts.DIRECTION
    assert "; in the same direction at best, because it is small, and the network is" in capped.reason
    assert "it is small" not in judged(speed(2.5), "paper").finding.reason
    assert judged(speed(1.5)).finding.reason == "a gain, but 1.5x is less than 0.9 of 2x"
    beyond = judged(speed(3.5)).finding
    assert beyond.label == "in the same direction, overshoot"
    bad = judged(speed(0.5)).finding
    assert bad.verdict is verdicts.NOT
    assert "; note that it is small, and the network is modelled" in bad.reason
    free = replace(speed(2.5), limits=())
    assert judged(free).finding.verdict is verdicts.REPRODUCED
    trivial = judged(free, "smoke").finding
    assert trivial.verdict is verdicts.UNJUDGED
    assert trivial.reason == "runs of this size only show that everything works"


@pytest.mark.parametrize("value", [0.5, 1.1, 1.5, 2.5, 3.5])
def test_a_remark_stands_beside_every_verdict(value: float) -> None:
    plain = claim(bound("UpTo", 2.0), lambda *_: figures(value), [judging.ASSUMED_GPU])
    remarked = replace(plain, remark="ours are clean")
    without, beside = judged(plain).finding, judged(remarked).finding
    assert beside == without._replace(reason=f"{without.reason}; ours are clean")


def test_claims_of_published_seconds_say_what_these_include() -> None:
    named = [
        each
        for each in claims_catalogue.load_all()
        if re.match(r"(SparDL|Ok-Topk|DeAR): (speed|fast)|Sketch-Fusion: (t|L)", each.name)
    ]
    assert len(named) == 12
    assert all("the cost of the published code" in each.remark for each in named)


@pytest.mark.parametrize("limit", [judging.ASSUMED_GPU, judging.LAB])
def test_other_hardware_judges_all_methods_by_one_rule(limit: Any) -> None:
    """Four workers on one machine disprove a published maximum of SparDL as little as one of DeAR."""
    bad = judged(claim(bound("UpTo", 2.0), lambda *_: figures(0.9), [limit])).finding
    assert bad.verdict.name == "UNJUDGED"
    assert limit.reason in bad.reason


@pytest.mark.parametrize(("value", "wanted"), [(3.0, "DIRECTION"), (2.0, "DIRECTION"), (1.1, "UNJUDGED")])
def test_a_guessed_gpu_neither_proves_nor_disproves(value: float, wanted: str) -> None:
    made = claim(bound("UpTo", 2.0), lambda *_: figures(value), [judging.ASSUMED_GPU, judging.MODELLED])
    finding = judged(made).finding
    assert finding.verdict.name == wanted
    if wanted == "UNJUDGED":
        assert finding.reason.endswith(
            "not enough for not reproduced, because GPU times are assumed with low certainty, not measured"
        )
        assert judged(replace(made, limits=(judging.MODELLED,))).finding.verdict.name == "NOT"


@pytest.mark.parametrize(
    ("values", "wanted"), [((2.0, 2.0), "BUILT_IN"), ((2.0, 3.0), "NOT")], ids=["holds", "is broken"]
)
def test_what_has_to_be_true_counts_apart(values: tuple[float, float], wanted: str) -> None:
    """But if it is not true, it is a verdict like any other."""
    ours, formula = values
    made = claim(bound("Equal"), lambda *_: figures(ours, against=[formula]), [judging.MODELLED], "by our own formula")
    judgement = judged(made)
    assert judgement.finding.verdict.name == wanted
    assert judgement.finding.reason.endswith("; by construction: by our own formula") == (wanted == "BUILT_IN")
    summary, _ = claims_catalogue.tables_of([judgement])
    counts = {row.name: row.cells[0].value for row in summary.rows}
    assert counts["reproduced"] == 0
    assert counts["checked by construction"] == (wanted == "BUILT_IN")


def test_what_has_to_be_true_is_so_declared() -> None:
    declared = {each.name for each in claims_catalogue.load_all() if each.construction}
    assert declared == {
        "SparDL: any number of workers",
        "SparDL: teams save rounds",
        "DeAR: no extra communication",
        "DeAR: what overlap alone can gain",
        "Sketch-Fusion: training efficiency",
        "Sketch-Fusion: LayerFusion for others",
    }


def test_a_column_that_is_gone_is_no_missing_result() -> None:
    """Else a claim would be silently given up when its exhibit changes."""
    rows = [tables.Row("one", [tables.Cell("1.5", 1.5)], []), tables.Row("two", [tables.Cell("none")], [])]
    table = tables.Table("T", ("method", "speed"), rows)
    assert [figure.values for figure in evidence.cells([table], "speed", bool).values()] == [(1.5,)]
    with pytest.raises(KeyError, match="no table has a column 'pace'"):
        evidence.cells([table], "pace", bool)
    with pytest.raises(judging.NoEvidence, match="no such figures at this size"):
        evidence.cells([table], "speed", lambda name: name == "two")


def test_turns_are_read_and_compared_one_by_one() -> None:
    rows = [tables.Row(name, [tables.Cell(text)], []) for name, text in (("a", "2, 4.5, 1"), ("b", "1, 1.5, 1"))]
    found = evidence.turns([tables.Table("T", ("method", lab.TURNS), rows)])
    assert evidence.ratio("a / b", found["a"], found["b"], 3.0)[:3] == ("a / b", [2.0, 3.0, 1.0], (3.0,))
    few = [tables.Row("a", [tables.Cell("2, 4.5")], [])]
    with pytest.raises(judging.NoEvidence, match="2 turns; 3 are required"):
        evidence.turns([tables.Table("T", ("method", lab.TURNS), few)])


def test_metrics_are_turned_as_their_tasks_say() -> None:
    higher = measures.HIGHER_IS_BETTER
    found = {
        metric: direction == "True"
        for path in (ROOT / "tasks").rglob("*.py")
        for metric, direction in re.findall(
            r"^    metric: ClassVar\[str\] = \"(\w+)\"\n    higher_is_better: ClassVar\[bool\] = (\w+)$",
            path.read_text(),
            re.MULTILINE,
        )
    }
    assert len(found) >= 5
    assert {metric for metric, direction in found.items() if direction} == higher
