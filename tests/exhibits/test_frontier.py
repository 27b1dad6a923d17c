"""The frontier: which work it takes, what is put together of it, which method is the fastest where, and its page."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts import choices, reproduce
from scripts.benchmarks import ddp_hooks
from scripts.exhibits import base, jobs, records
from scripts.exhibits.catalogue import catalogue
from scripts.exhibits.kinds import frontier as kind
from scripts.exhibits.kinds import lab, races
from scripts.pages.exhibits import frontier_figure
from tests.support.labs import in_a_lab
from tests.support.measuring import undisturbed
from tests.support.shown import axes as axes_of
from tests.support.shown import texts as cells

FRONTIER: Any = catalogue()["frontier"]
ROOT = Path(__file__).resolve().parents[2]
DENSE, LOCAL, LOST = "dense DDP", "DiLoCo", "SparseLoCo"
CASES = {DENSE: "ddp", LOCAL: "outer.none,every=5", LOST: "outer.topka,every=5"}
# By method: the loss of each test, and seconds of a step at 0.1 and 1 Gbit/s.
LOSSES: Mapping[str, Any] = {
    DENSE: (4.0, 3.0, 2.0, 1.0, 1.0, 1.0),
    LOCAL: (5.0, 4.0, 3.0, 2.0, 1.5, 1.02),
    LOST: (5.0, 5.0, 5.0, 5.0, 5.0, 5.0),
}
PACES: Mapping[str, Any] = {DENSE: (1.0, 0.2), LOCAL: (0.25, 0.2), LOST: (0.1, 0.1), "alone": (0.1, 0.1)}


def exhibit(**changes: Any) -> Any:
    entrants = tuple(kind.Entrant(name, case, 0.1, (0.1, 0.2), whole=name == DENSE) for name, case in CASES.items())
    course = kind.Course("GPT", ("model=x",), entrants, (0.1, 1.0), (1, 2), 30, 5, 0.1)
    return replace(FRONTIER, courses={"smoke": (replace(course, **changes),)})


def of(case: str) -> str:
    """The method that a case is one of."""
    (name,) = (name for name, each in {**CASES, "alone": "alone"}.items() if case.startswith(each))
    return name


def outcome(job: Any, losses: Mapping[str, Any], lost: frozenset[Any]) -> jobs.Outcome | None:
    if job in lost:
        return None
    given, made = dict(job.arguments), {"environment": {"cpu": "a processor"}}
    if job.name == "frontier.paced":
        place = (0.1, 1.0).index(given["gbit"])
        cases = given["words"][given["words"].index("--cases") + 1 :]
        rows = {case: {"seconds": [9.0, PACES[of(case)][place], 0.0], "sent": [2e6, 4e6]} for case in cases}
        return job.recalled({"result": {"cases": rows}, **made}, Path("x.json"))
    case = given.get("case") or given["words"][given["words"].index("--case") + 1]
    tests = [{"step": 5 * number, "loss": value} for number, value in enumerate(losses[of(case)], 1)]
    result = {"evaluations": tests, "cluster_seconds": 20.0, "step_bytes": 3e6, "steps": 30}
    return job.recalled({"result": result, **made}, Path("x.json"))


def results(shown: Any, losses: Mapping[str, Any] = LOSSES, lost: frozenset[Any] = frozenset()) -> base.Results:
    found = {job: outcome(job, losses, lost) for job in shown.jobs("smoke")}
    return base.Results(Path("x"), {job: each for job, each in found.items() if each})


def test_seconds_are_steps_times_the_median_pace_by_hand() -> None:
    """Dense begins at 4 and ends at 1, so 1.06 is as good; after half of the steps it is at 2."""
    shown = exhibit()
    (course,) = shown.courses["smoke"]
    slow, fast = (shown.link(course, gbit, results(shown)) for gbit in (0.1, 1.0))
    assert cells(slow, DENSE) == {
        "to as good as dense": "20 s",
        "to half-way": "15 s",
        "final loss": "1 (2 seeds)",
        "seeds": "2",
        "ms a step": "1e+03",
        "MB a step": "3",
        "computing": "10%",
    }
    assert cells(slow, LOCAL)["to as good as dense"] == "7.5 s"
    assert cells(fast, LOCAL)["to half-way"] == "4 s"
    assert cells(slow, LOST)["to half-way"] == "never"
    assert "as good as dense: 1.06; half-way: 2" in slow.title


def test_who_is_the_fastest_where() -> None:
    """Local steps send less, and take longer to the near target: 30 steps against 20."""
    shown = exhibit()
    (course,) = shown.courses["smoke"]
    near, far = (shown.advice(course, goal, results(shown)) for goal in shown.goals(course, results(shown)))
    assert [row.cells[0].text for row in near.rows] == [LOCAL, DENSE]
    border = float(near.rows[0].name.removeprefix("100 to "))
    # Seconds of a step: dense 1/9 + 89/b, local 0.194 + 5.56/b, times 20 and 30; equal at b = 448.
    assert border == pytest.approx(448, rel=0.02)
    assert near.rows[1].name == f"{near.rows[0].name.rpartition(' ')[2]} to 1,000"
    assert cells(near, near.rows[0].name)["dense takes"].startswith("20 to ")
    assert LOST not in str(near.rows + far.rows)
    assert far.rows[0].cells[1].text.startswith("5 to ")


def test_stretches_by_hand() -> None:
    ways = {"few bytes": {10.0: 2.0, 1000.0: 2.0}, "many": {10.0: 101.0, 1000.0: 2 - 0.5}}
    one, other = races.stretches(ways)
    # many: 0.495 + 1005 / b, which is 2 at b = 668.
    assert (one.name, one.low, other.name, other.high) == ("few bytes", 10.0, "many", 1000.0)
    assert one.high == other.low == pytest.approx(668, rel=0.03)
    assert races.between(ways["many"], 100.0) == pytest.approx(0.495 + 10.05, rel=1e-2)
    assert races.between(ways["many"], 10.0) == 101.0
    assert races.stretches({}) == []


def test_what_is_not_there_says_so() -> None:
    shown = exhibit()
    (course,) = shown.courses["smoke"]
    dense, local, _ = course.entrants
    lost = frozenset({course.lesson(local, 0.1, 2), course.lesson(local, 0.2, 1), course.pacing(1.0)})
    found = results(shown, lost=lost)
    slow, fast = (shown.link(course, gbit, found) for gbit in course.gbits)
    assert cells(slow, LOCAL)["seeds"] == "1 of 2"
    assert cells(fast, LOCAL)["ms a step"] == "not run yet"
    assert cells(fast, LOCAL)["to half-way"] == "20 steps"
    assert cells(shown.rates(course, found), LOCAL) == {"0.1": "1.02 *", "0.2": "not run yet"}
    (row,) = shown.advice(course, shown.goals(course, found)[0], found).rows
    assert (row.name, row.cells[0].text) == ("100 to 100", LOCAL)
    gone = frozenset(course.lesson(dense, 0.1, seed) for seed in course.seeds)
    assert shown.goals(course, results(shown, lost=gone)) == []
    assert cells(shown.link(course, 0.1, results(shown, lost=gone)), LOCAL)["to half-way"] == "no target yet"
    nothing = base.Results(Path("x"), {})
    assert shown.tables("smoke", nothing)
    assert shown.pictures("smoke", nothing)


def test_other_outer_steps_are_shown_once() -> None:
    shown = exhibit()
    (course,) = shown.courses["smoke"]
    dense, local, lost = course.entrants
    steps = tuple(f"{local.case},lr={lr},momentum={of}" for lr, of in ((0.7, 0.9), (0.4, 0.9), (0.7, 0.5)))
    published, used, other = steps
    course = replace(course, entrants=(dense, local._replace(case=used, steps=steps, around=(0.1,)), lost))
    shown = replace(shown, courses={"smoke": (course,)})
    given = [dict(job.arguments) for job in course.lessons()]
    tried = [(each["case"], each["seed"], each["train"].rpartition("=")[2]) for each in given if each["case"] in steps]
    assert sorted(tried) == sorted(
        [(published, 1, "0.1"), (published, 1, "0.2"), (used, 1, "0.1"), (used, 2, "0.1"), (other, 1, "0.1")]
    )
    lost_one = frozenset(job for job in course.lessons() if dict(job.arguments)["case"] == other)
    table = shown.rates(course, results(shown, lost=lost_one))
    assert table.columns == ("method", "0.1", "0.2")
    assert [(row.name, *(cell.text for cell in row.cells)) for row in table.rows[1:4]] == [
        (f"{LOCAL}: lr=0.7, momentum=0.9", "1.02", "1.02"),
        (f"{LOCAL}: lr=0.4, momentum=0.9", "1.02 *", ""),
        (f"{LOCAL}: lr=0.7, momentum=0.5", "not run yet", ""),
    ]
    assert table.rows[3].jobs == list(lost_one)
    assert table in shown.tables("smoke", results(shown, lost=lost_one))
    # Seconds are those of published outer steps.
    words = dict(course.pacing(0.1).arguments)["words"]
    assert published in words
    assert not {used, other} & set(words)
    assert cells(shown.link(course, 0.1, results(shown)), LOCAL)["ms a step"] == "250"


def test_whole_trainings_check_what_is_put_together() -> None:
    shown = exhibit()
    (course,) = shown.courses["smoke"]
    table = shown.check(course, results(shown))
    assert [row.name for row in table.rows] == [f"{DENSE}, 100 Mbit/s", f"{DENSE}, 1000 Mbit/s"]
    assert cells(table, f"{DENSE}, 100 Mbit/s") == {
        "seconds put together": "30",
        "by the clock": "20",
        "ratio": "1.5",
        "ratio of bytes": "1",
        "losses": "the same",
    }
    found = results(shown)
    other = outcome(course.whole(course.entrants[0], 0.1), {**LOSSES, DENSE: (1.0,) * 6}, frozenset())
    assert other
    changed = base.Results(Path("x"), {**found.found, course.whole(course.entrants[0], 0.1): other})
    assert cells(shown.check(course, changed), f"{DENSE}, 100 Mbit/s")["losses"] == "others"


def test_a_panel_for_each_link_with_a_line_for_each_method() -> None:
    shown = exhibit()
    found = results(shown)
    slow, fast = shown.pictures("smoke", found)
    assert slow.caption == fast.caption
    assert set(slow.key) == set(CASES)
    dense, local, *_ = axes_of(slow).lines
    assert list(dense.get_xdata()) == pytest.approx([5.0, 10.0, 15.0, 20.0, 25.0, 30.0])
    assert list(local.get_xdata()) == pytest.approx([1.25, 2.5, 3.75, 5.0, 6.25, 7.5])
    assert list(local.get_ydata()) == [5.0, 4.0, 3.0, 2.0, 1.5, 1.02]
    assert frontier_figure(shown, found, "smoke").startswith(b"\x89PNG")


@pytest.mark.parametrize("scale", ["smoke", "laptop", "paper"])
def test_turns_have_whole_periods_and_every_case_exists(scale: str) -> None:
    with choices.composing():
        for course in base.at(scale, FRONTIER.courses):
            assert course.entrants[0].case == "ddp"
            assert course.steps % course.every == 0
            assert list(course.gbits) == sorted(course.gbits)
            for entrant in course.entrants:
                way, options = ddp_hooks.parsed(entrant.case)
                assert way.startswith(ddp_hooks.LOCAL) == ("every" in options) == bool(entrant.steps)
                assert not entrant.steps or entrant.case in entrant.steps
                assert entrant.rate in entrant.tried or scale == "smoke"
                assert course.every % options.get("every", 1) == 0
            words = shlex.split(course.pacing(course.gbits[0]).command)
            arguments = lab.netlab.parse(words[2:])
            assert arguments.workers == course.workers
            assert arguments.command[1:3] == ["scripts/bench.py", "hooks"]
            assert choices.composed(*course.train(0.1).split(","))["optimizer"]["lr"] == 0.1


def test_curves_come_first_and_seconds_are_measured_alone() -> None:
    work = FRONTIER.jobs("laptop")
    assert len({job.id for job in work}) == len(work)
    alone = [job.alone for job in work]
    assert alone == sorted(alone)
    few = FRONTIER.with_seeds(1).jobs("laptop")
    assert set(few) < set(work)
    assert "alone on the machine" in FRONTIER.cost("laptop")


def test_a_curve_is_that_of_the_bench(tmp_path: Path) -> None:
    """In real processes; local steps end with an exchange, and so with one loss on all workers."""
    shown = reproduce.chosen(["frontier"])[0]
    work = [job for job in shown.jobs("smoke") if not job.alone][:2]
    jobs.complete(work, tmp_path, at_once=1)
    for job in work:
        found = job.find(tmp_path)
        assert found
        tests = found.data["evaluations"]
        assert [test["step"] for test in tests] == [5, 10, 15]
        assert {"seconds", "sent"}.isdisjoint(tests[0])
        assert tests[-1]["loss"] < 4


def test_rates_and_outer_steps_are_best_on_record() -> None:
    store = records.RecordStore(ROOT / "docs" / "results")
    found = base.Results.on_disk(ROOT / "docs" / "results", FRONTIER.jobs("laptop"), store)
    for course in FRONTIER.courses["laptop"]:
        for entrant in course.entrants:
            tried = {(case, rate): job for case, jobs in course.trials(entrant).items() for rate, job in jobs.items()}
            ends = {each: found.of(job) for each, job in tried.items()}
            losses = {each: end.data["evaluations"][-1]["loss"] for each, end in ends.items() if end.reason is None}
            best = min(losses, key=lambda each: losses[each] if losses[each] is not None else 1e9)
            assert best == (entrant.case, entrant.rate), entrant.name


@in_a_lab
@pytest.mark.timeout(900)
def test_in_a_lab_what_is_put_together_is_there(tmp_path: Path) -> None:
    work, (course,) = FRONTIER.jobs("smoke"), FRONTIER.courses["smoke"]
    attempts = itertools.count()

    def ratio() -> float:
        folder = tmp_path / str(next(attempts))
        jobs.complete(work, folder, at_once=1)
        found = base.Results.on_disk(folder, work)
        table = FRONTIER.check(course, found)
        shown = cells(table, f"{course.entrants[0].name}, {1000 * course.gbits[0]:g} Mbit/s")
        assert shown["losses"] == "the same"
        paces = FRONTIER.link(course, course.gbits[0], found)
        assert float(cells(paces, "dense DDP")["MB a step"]) > 10 * float(cells(paces, "SparDL, every 5")["MB a step"])
        return float(shown["ratio of bytes"])

    undisturbed(ratio, lambda found: found == pytest.approx(1, abs=0.1), seconds=300)
