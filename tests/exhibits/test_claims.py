"""Claims: what they find, results that are missing or failed, and limits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.exhibits import base, jobs, tables
from scripts.exhibits.claims import catalogue, judging
from scripts.exhibits.claims import figures as found_in
from scripts.exhibits.kinds import lab, trainings
from tests.support.claiming import DIGITS, LONG, claim, exhibit_of, figures, judged, outcome, rule

ROOT = Path(__file__).resolve().parents[2]
GOOD, BAD = (0.8, 0.9, 0.8), (0.2, 0.3, 0.2)
VGG = "a small network on digits, for VGG on CIFAR"
OTHER = replace(DIGITS, words=("cluster.workers=3",), name="BERT", what="a small one")
UNKNOWN = replace(OTHER, known=None)


def find(exhibit: Any, scale: str, results: Any) -> Any:
    return found_in.metrics(exhibit, scale, results, "one", "two")


ACCURACY = claim(rule("NoLoss"), find)


def speed(value: float, *limits: Any) -> Any:
    return claim(rule("UpTo", 2.0), lambda *_: figures(value), limits)


def ended(*values: float, **words: Any) -> list[Any]:
    return [outcome(value, **words) for value in values]


@pytest.mark.usefixtures("composing")
@pytest.mark.parametrize(
    ("found", "verdict", "reason"),
    [
        (ended(*GOOD, *GOOD), "REPRODUCED", f"{VGG}: no loss"),
        (ended(*BAD, *GOOD), "NOT", f"{VGG}: worse by"),
        (ended(0.9, 0.8, 0.7, 0.5, 0.4, 0.3, metric="wer"), "NOT", f"{VGG}: worse by"),
        # Neither a good figure nor a bad one says anything of accuracy after a short training or with a bad baseline.
        (ended(*BAD, *GOOD, steps=LONG - 1), "UNJUDGED", f"too short: 199 steps where 200 are needed ({VGG})"),
        (ended(*BAD, *BAD), "UNJUDGED", f"the dense baseline reached only 0.2333; reference 0.5 (a book) ({VGG}"),
        (ended(*[0.9] * 5), "UNJUDGED", "1 of 6 required results are missing: not run yet"),
        (
            [outcome(0, "out of memory"), *ended(*[0.9] * 4)],
            "UNJUDGED",
            "2 of 6 required results are missing: out of memory; not run yet",
        ),
        (ended(*[0.9] * 5, float("nan")), "UNJUDGED", "1 of 6 trainings ended without a finite number"),
    ],
)
def test_a_claim_is_judged_by_its_results(found: list[Any], verdict: str, reason: str) -> None:
    judgement = judged(ACCURACY, found=found)
    assert judgement.finding.verdict.name == verdict
    assert judgement.finding.reason.startswith(reason)
    assert len(judgement.jobs) == 6
    assert (judgement.finding.ours == "-") == ("required results" in reason or "finite" in reason)


@pytest.mark.usefixtures("composing")
def test_a_baseline_that_overfits_is_no_baseline() -> None:
    """A method that learns less also overfits less, and seems to be better."""
    found = ended(*GOOD, *BAD)
    for each in found[3:]:
        each.data["best"] = 0.9
    finding = judged(ACCURACY, found=found).finding
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
    assert trainings.Known(0.5, "a book", tolerance).reached(values, higher=True) == reached
    mirrored = [-value for value in values]
    assert trainings.Known(-0.5, "a book", tolerance).reached(mirrored, higher=False) == reached


@pytest.mark.usefixtures("composing")
def test_every_task_has_its_own_verdict() -> None:
    """One claim's verdict says nothing about the single task; support and failure together depend on the task."""
    found, both = ended(*BAD, *GOOD, *GOOD, *GOOD), exhibit_of(DIGITS, OTHER)
    judgement = judged(ACCURACY, found=found, exhibit=both)
    verdicts = [(task.task, task.finding.verdict.name, len(task.jobs)) for task in judgement.tasks]
    assert verdicts == [(VGG, "NOT", 6), ("a small one, for BERT", "REPRODUCED", 6)]
    assert judgement.finding.label == "depends on the task"
    assert "for VGG on CIFAR: worse by" in judgement.finding.reason
    assert "for BERT: no loss" in judgement.finding.reason
    assert judgement.finding.ours.endswith("a small one, for BERT: 0%: reproduced")
    limited = replace(ACCURACY, limits=(judging.Limit.STAND_INS,))
    judgement = judged(limited, found=found, exhibit=both)
    assert judgement.finding.ours.endswith("a small one, for BERT: 0%: in the same direction")  # as in its own row


@pytest.mark.usefixtures("composing")
def test_a_claim_has_tasks_of_several_exhibits() -> None:
    known = {"x.y": exhibit_of(DIGITS), "x.z": replace(exhibit_of(OTHER), name="x.z", title="U")}
    first, second = (exhibit.jobs("laptop") for exhibit in known.values())
    made = replace(ACCURACY, also=("x.z",))

    def judge(found: dict[Any, Any]) -> Any:
        judgement = judging.judge(made, known, "laptop", base.Results(Path("runs"), found))
        return judgement, [task.finding.verdict.name for task in judgement.tasks]

    half = dict(zip(first, ended(*GOOD, *GOOD), strict=True))
    rest = dict(zip(second, ended(*GOOD, *GOOD), strict=True))
    lost = dict.fromkeys(second, jobs.Outcome(Path("runs"), {}, "out of memory"))
    assert judge({**half, **rest})[1] == ["REPRODUCED", "REPRODUCED"]
    assert judge({**half, **lost})[1] == ["REPRODUCED", "UNJUDGED"]
    kept, verdicts = judge(half)
    assert verdicts == ["REPRODUCED"]  # what was not run has no verdict
    assert kept.finding.verdict.name == "DIRECTION"
    assert "not judged: 6 of 6 required results are missing: not run yet (U)" in kept.finding.reason
    none, verdicts = judge({})
    assert (none.finding.verdict.name, none.finding.ours, verdicts, len(none.jobs)) == ("UNJUDGED", "-", [], 12)


@pytest.mark.usefixtures("composing")
@pytest.mark.parametrize(
    ("cases", "found", "verdict", "reason"),
    [
        (
            (UNKNOWN,),
            (*GOOD, *GOOD),
            "UNJUDGED",
            "no reference value of dense training is known for this task (a s",
        ),
        ((DIGITS, UNKNOWN), (*GOOD, *GOOD, *BAD, *GOOD), "DIRECTION", "not judged: no reference value of dense"),
        ((DIGITS, UNKNOWN), (*BAD, *GOOD, *GOOD, *GOOD), "NOT", "not judged: no reference value of dense"),
        (
            (DIGITS, OTHER),
            GOOD * 3,
            "DIRECTION",
            "not judged: 3 of 6 required results are missing: not run yet (a small one, for BERT)",
        ),
        ((replace(DIGITS, words=(*DIGITS.words, "warmup.steps=1")),), GOOD * 2, "UNJUDGED", "too short: 199 steps"),
    ],
)
def test_a_case_that_cannot_be_judged_is_named(cases: Any, found: Any, verdict: str, reason: str) -> None:
    judgement = judged(ACCURACY, found=ended(*found), exhibit=exhibit_of(*cases))
    assert judgement.finding.verdict.name == verdict
    assert reason in judgement.finding.reason
    assert len(judgement.jobs) == 6 * len(cases)


@pytest.mark.usefixtures("composing")
def test_seconds_of_several_machines_are_not_judged() -> None:
    def find(cpus: str) -> Any:
        found = [outcome(value)._replace(made={"cpu": cpu}) for value, cpu in zip(GOOD * 2, cpus, strict=True)]
        results = base.Results(Path("runs"), dict(zip(exhibit.jobs("laptop"), found, strict=True)))
        return found_in.seconds_of_teams(exhibit, "laptop", results)

    exhibit = exhibit_of(DIGITS)
    assert [figure.values for figure in find("AAAAAA")] == [[8, 9, 8]] * 2
    with pytest.raises(judging.NoEvidence, match="seconds of different machines do not compare: A; B"):
        find("AAAABB")


@pytest.mark.usefixtures("composing")
def test_the_floor_is_that_of_the_exhibit() -> None:
    whole = exhibit_of(DIGITS)
    exhibit = replace(whole, methods={**whole.methods, "alone": trainings.ALONE})
    kept = judged(ACCURACY, found=ended(*GOOD * 3), exhibit=exhibit).finding
    assert "single worker without communication: 0%; it passes" in kept.reason
    lost = judged(ACCURACY, found=ended(*GOOD * 2), exhibit=exhibit).finding
    assert lost.reason == "3 of 9 required results are missing: not run yet"


@pytest.mark.usefixtures("composing")
def test_an_order_needs_all_its_trainings() -> None:
    """One that is too short spoils it: there are no cases to be left out."""

    def order(exhibit: Any, scale: str, results: Any) -> Any:
        (found,) = found_in.accuracies(exhibit, exhibit.plans[scale], results, ("two", "one")).values()
        return list(found.values())

    made = claim(rule("Order"), order)
    assert judged(made, found=ended(*BAD, *GOOD)).finding.verdict.name == "REPRODUCED"
    finding = judged(made, found=ended(*BAD, *GOOD, steps=LONG - 1)).finding
    assert (finding.verdict.name, finding.reason) == ("UNJUDGED", "too short: 199 steps where 200 are needed (one)")
    alone = replace(exhibit_of(DIGITS), methods={"one": ("compressor=topka",)})
    with pytest.raises(KeyError, match="has no dense training"):
        assert alone.dense_names


LIMIT = judging.Limit
TRAINED = "models, data and lengths of training are not the published ones"
GPU = "GPU times are assumed with low certainty, not measured"


@pytest.mark.parametrize(
    ("value", "limits", "scale", "verdict", "words"),
    [
        (2.5, (), "laptop", "REPRODUCED", "2.5x is at least 0.9 of 2x"),
        (2.5, (), "smoke", "UNJUDGED", "runs of this size only show that everything works"),
        (
            2.5,
            (LIMIT.STAND_INS, LIMIT.MODELLED),
            "laptop",
            "DIRECTION",
            f"; in the same direction at best, because {TRAINED}, and the network is modelled",
        ),
        (3.5, (LIMIT.MODELLED,), "laptop", "DIRECTION", "far beyond the published figure: "),
        (
            0.5,
            (LIMIT.STAND_INS, LIMIT.MODELLED),
            "laptop",
            "NOT",
            f"; note that {TRAINED}, and the network is modelled",
        ),
        # Other hardware neither proves nor disproves, whichever method it measures.
        (2.0, (LIMIT.ASSUMED_GPU, LIMIT.MODELLED), "laptop", "DIRECTION", GPU),
        (
            1.1,
            (LIMIT.ASSUMED_GPU, LIMIT.MODELLED),
            "laptop",
            "UNJUDGED",
            f"enough for not reproduced, because {GPU}",
        ),
        (0.9, (LIMIT.LAB,), "laptop", "UNJUDGED", "because four workers on one machine"),
    ],
)
def test_limits_bound_a_verdict_and_say_why(value: float, limits: Any, scale: str, verdict: str, words: str) -> None:
    made = speed(value, *limits)
    plain, remarked = (judged(each, scale).finding for each in (made, replace(made, remark="ours are clean")))
    assert plain.verdict.name == verdict
    assert words in plain.reason
    assert remarked == plain._replace(reason=f"{plain.reason}; ours are clean")


@pytest.mark.parametrize(
    ("values", "wanted"), [((2.0, 2.0), "BUILT_IN"), ((2.0, 3.0), "NOT")], ids=["holds", "is broken"]
)
def test_what_has_to_be_true_counts_apart(values: tuple[float, float], wanted: str) -> None:
    """But if it is not true, it is a verdict like any other."""
    ours, formula = values
    made = claim(rule("Equal"), lambda *_: figures(ours, against=[formula]), [LIMIT.MODELLED], "by our own formula")
    judgement = judged(made)
    assert judgement.finding.verdict.name == wanted
    assert judgement.finding.reason.endswith("; by construction: by our own formula") == (wanted == "BUILT_IN")
    summary, _ = catalogue.tables_of([judgement])
    counts = {row.name: row.cells[0].value for row in summary.rows}
    assert (counts["reproduced"], counts["checked by construction"]) == (0, wanted == "BUILT_IN")


def test_a_column_that_is_gone_is_no_missing_result() -> None:
    """Else a claim would be silently given up when its exhibit changes."""
    rows = [tables.Row("one", [tables.Cell("1.5", 1.5)], []), tables.Row("two", [tables.Cell("none")], [])]
    table = tables.Table("T", ("method", "speed"), rows)
    assert [figure.values for figure in found_in.cells([table], "speed").values()] == [(1.5,)]
    with pytest.raises(KeyError, match="no table has a column 'pace'"):
        found_in.cells([table], "pace")
    with pytest.raises(judging.NoEvidence, match="no such figures at this size"):
        found_in.cells([table], "speed", lambda name: name == "two")


class Lab:
    """An exhibit with one table, of timings in turns."""

    def __init__(self, **seconds: str) -> None:
        rows = [tables.Row(name.replace("_", "'"), [tables.Cell(text)], []) for name, text in seconds.items()]
        self.made = [tables.Table("T", ("method", lab.TURNS), rows)]

    def jobs(self, scale: str) -> list[Any]:
        return []

    def tables(self, scale: str, results: Any) -> Any:
        return self.made


def test_turns_are_read_and_compared_one_by_one() -> None:
    results = base.Results(Path("x"), {})
    found = found_in.turns(Lab(a="2, 4.5, 1", b="1, 1.5, 1"), "laptop", results)
    assert found_in.ratio("a / b", found["a"], found["b"], 3.0)[:3] == ("a / b", [2.0, 3.0, 1.0], (3.0,))
    with pytest.raises(judging.NoEvidence, match="2 turns; 3 are required"):
        found_in.turns(Lab(a="2, 4.5"), "laptop", results)


def test_the_fastest_rival_is_named_though_it_wins() -> None:
    """In the lab TopkA took 0.106 s and SparDL 0.115 s: the published result of Ok-Topk stands next to it."""
    seconds = {"spardl": "0.115", "oktopk": "0.4", "topka": "0.106", "none": "0.6", "torch_s dense": "0.01"}
    timed = Lab(**{name: ", ".join([each] * 3) for name, each in seconds.items()})
    (found,) = found_in.spardl_in_the_lab(timed, "laptop", base.Results(Path("x"), {}))
    finding = rule("UpTo", 4.9).judge([found])
    assert finding.verdict.name == "NOT"
    assert finding.ours == "0.9217x (4 workers: SparDL against TopkA; 3.478x over Ok-Topk, 5.217x over dense)"
