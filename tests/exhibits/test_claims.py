"""Claims: what they find, results that are missing or failed, and limits."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.exhibits import measures, tables
from scripts.exhibits.claims import base as claims_base
from scripts.exhibits.claims import catalogue as claims_catalogue
from scripts.exhibits.claims import evidence, judging
from scripts.exhibits.kinds import lab, trainings
from tests.claiming import DIGITS, LONG, bound, claim, exhibit_of, figures, judged, outcome, seeded

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
        (BAD, BAD, LONG, "the dense twin reached only 0.2333, where 0.5 (a book) is known (a small network"),
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
def test_a_twin_that_was_better_before_its_end_is_none() -> None:
    """Whoever learns less by then overfits less, and seems to be better."""
    found = [outcome(value) for value in (*GOOD, *BAD)]
    for each in found[3:]:
        each.data["best"] = 0.9
    finding = judged(claim(seeded("NoLoss"), accuracies), found=found).finding
    assert finding.verdict.name == "UNJUDGED"
    said = "the dense twin overfits: it ended at 0.2333, after 0.9, where 0.5 (a book) is known"
    assert finding.reason.startswith(said)


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
    assert one.reason == "it is not known what dense training reaches here (a small one, for BERT)"
    both = exhibit_of(DIGITS, unknown)
    kept = judged(made, found=[outcome(value) for value in (*GOOD, *GOOD, *BAD, *GOOD)], exhibit=both).finding
    assert kept.verdict.name == "DIRECTION"  # not all cases were judged
    assert "left out, for they cannot be judged: it is not known" in kept.reason
    worse = judged(made, found=[outcome(value) for value in (*BAD, *GOOD, *GOOD, *GOOD)], exhibit=both).finding
    assert worse.verdict.name == "NOT"


@pytest.mark.parametrize(("alone", "passes"), [((0.9, 0.91, 0.92), True), ((0.6, 0.61, 0.62), False)])
def test_what_one_worker_alone_reaches_is_told(alone: tuple[float, ...], passes: bool) -> None:
    """Where it passes the same test, a method that passes has only done no harm."""
    (ours,) = figures((0.9, 0.91, 0.92), against=[(0.9, 0.91, 0.92)])
    without, beside = (seeded("NoLoss").judge([each]) for each in (ours, ours._replace(floor=alone)))
    assert beside.verdict is without.verdict
    assert "alone" not in without.reason
    assert ("it passes, too" in beside.reason) == passes
    assert f"one worker alone, which sends nothing: {'0%' if passes else '-32.97%'}" in beside.reason


@pytest.mark.usefixtures("composing")
def test_the_floor_is_that_of_the_exhibit() -> None:
    whole = exhibit_of(DIGITS)
    exhibit = replace(whole, methods={**whole.methods, "alone": trainings.ALONE})
    made = claim(seeded("NoLoss"), accuracies)
    kept = judged(made, found=[outcome(value) for value in GOOD * 3], exhibit=exhibit).finding
    assert "one worker alone, which sends nothing: 0%; it passes" in kept.reason
    lost = judged(made, found=[outcome(value) for value in (*GOOD, *GOOD)], exhibit=exhibit).finding
    assert lost.reason == "3 of 9 results that it needs are missing: not run yet"


@pytest.mark.usefixtures("composing")
def test_a_case_that_waits_is_named_and_keeps_no_other_back() -> None:
    other = replace(DIGITS, words=("cluster.workers=3",), name="BERT", what="a small one")
    made = claim(seeded("NoLoss"), lambda *words: evidence.metrics_so_far(*words, "one", "two"))
    both = exhibit_of(DIGITS, other)
    missing = "3 of 6 results that it needs are missing: not run yet"
    kept = judged(made, found=[outcome(value) for value in GOOD * 3], exhibit=both)
    assert kept.finding.verdict.name == "DIRECTION"
    assert f"left out, for they cannot be judged: {missing} (a small one, for BERT)" in kept.finding.reason
    assert len(kept.jobs) == 12
    short = [outcome(value, steps=LONG - 1) for value in GOOD * 3]
    assert judged(made, found=short, exhibit=both).finding.verdict.name == "UNJUDGED"
    none = judged(made, exhibit=both)
    assert (none.finding.verdict.name, none.finding.ours, len(none.jobs)) == ("UNJUDGED", "-", 12)
    assert none.finding.reason.startswith("a small network on digits, for VGG on CIFAR: 6 of 6 results")


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


def test_an_exhibit_without_dense_training_cannot_judge_accuracies() -> None:
    alone = replace(exhibit_of(DIGITS), methods={"one": ("compressor=topka",)})
    with pytest.raises(KeyError, match="has no dense training"):
        assert alone.twins


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([], "6 of 6 results that it needs are missing: not run yet"),
        ([0.9] * 5, "1 of 6 results that it needs are missing: not run yet"),
        ([0.9, "out of memory", *[0.9] * 3], "2 of 6 results that it needs are missing: out of memory; not run yet"),
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
    limits = [judging.Limit("it is small", verdicts.DIRECTION, ("laptop",)), judging.LAB]

    def speed(value: float) -> Any:
        return claim(bound("UpTo", 2.0), lambda *_: figures(value), limits)

    capped = judged(speed(2.5)).finding
    assert capped.verdict is verdicts.DIRECTION
    assert "; in the same direction at best, because it is small, and four workers" in capped.reason
    assert "it is small" not in judged(speed(2.5), "paper").finding.reason
    assert judged(speed(1.5)).finding.reason == "a gain, but 1.5x is less than 0.9 of 2x"
    beyond = judged(speed(3.5)).finding
    assert beyond.label == "in the same direction, overshoot"
    bad = judged(speed(0.5)).finding
    assert bad.verdict is verdicts.NOT
    assert "; here, where it is small, and four workers" in bad.reason
    free = replace(speed(2.5), limits=())
    assert judged(free).finding.verdict is verdicts.REPRODUCED
    trivial = judged(free, "smoke").finding
    assert trivial.verdict is verdicts.UNJUDGED
    assert trivial.reason == "work of this scale shows that everything runs, and nothing else"


@pytest.mark.parametrize("value", [0.5, 1.1, 1.5, 2.5, 3.5])
def test_a_remark_stands_beside_every_verdict(value: float) -> None:
    plain = claim(bound("UpTo", 2.0), lambda *_: figures(value), [judging.ASSUMED_GPU])
    remarked = replace(plain, remark="ours are clean")
    without, beside = judged(plain).finding, judged(remarked).finding
    assert beside == without._replace(reason=f"{without.reason}; ours are clean")


def test_claims_of_published_seconds_say_what_these_include() -> None:
    named = [
        each
        for each in claims_catalogue.CLAIMS
        if re.match(r"(SparDL|Ok-Topk|DeAR): (speed|fast)|Sketch-Fusion: (t|L)", each.name)
    ]
    assert len(named) == 12
    assert all("what the published code costs" in each.remark for each in named)


@pytest.mark.parametrize(("value", "wanted"), [(3.0, "DIRECTION"), (2.0, "DIRECTION"), (1.1, "UNJUDGED")])
def test_a_guessed_gpu_neither_proves_nor_disproves(value: float, wanted: str) -> None:
    made = claim(bound("UpTo", 2.0), lambda *_: figures(value), [judging.ASSUMED_GPU, judging.MODELLED])
    finding = judged(made).finding
    assert finding.verdict.name == wanted
    if wanted == "UNJUDGED":
        assert finding.reason.endswith(
            "not enough for not reproduced, because what a GPU takes is assumed with low certainty, not measured"
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
    declared = {each.name for each in claims_catalogue.CLAIMS if each.construction}
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
    with pytest.raises(judging.NoEvidence, match="no such figures at this scale"):
        evidence.cells([table], "speed", lambda name: name == "two")


def test_turns_are_read_and_compared_one_by_one() -> None:
    rows = [tables.Row(name, [tables.Cell(text)], []) for name, text in (("a", "2, 4.5, 1"), ("b", "1, 1.5, 1"))]
    found = evidence.turns([tables.Table("T", ("method", lab.TURNS), rows)])
    assert evidence.ratio("a / b", found["a"], found["b"], 3.0)[:3] == ("a / b", [2.0, 3.0, 1.0], (3.0,))
    few = [tables.Row("a", [tables.Cell("2, 4.5")], [])]
    with pytest.raises(judging.NoEvidence, match="2 turns, where 3 are needed"):
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
