"""The rules that claims are judged by, at their borders."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.exhibits.claims.judging import ORDER
from tests.support.claiming import figures, rule, verdict

RATIOS = st.floats(0.1, 100)
SEEDS = st.lists(st.floats(-100, 100), min_size=3, max_size=3)
RANK = {one.name: place for place, one in enumerate(ORDER)}


@pytest.mark.parametrize(
    ("name", "words", "values", "rivals", "wanted"),
    [
        ("UpTo", (2,), [1.8], None, "REPRODUCED"),  # 0.9 of 2
        ("UpTo", (2,), [1.0, 1.8], None, "REPRODUCED"),
        ("UpTo", (2,), [1.799], None, "DIRECTION"),
        ("UpTo", (2,), [1.415], None, "DIRECTION"),  # just above the root of 2: half of the gain in logarithms
        ("UpTo", (2,), [1.414], None, "NOT"),
        ("UpTo", (2,), [0.5, 0.9], None, "NOT"),
        ("UpTo", (2,), [(1.0, 1.5, 2.2)], None, "NOT"),  # a gain on average, but not beyond the spread of seeds
        ("UpTo", (2,), [(1.45, 1.5, 1.55)], None, "DIRECTION"),
        ("UpTo", (2,), [(1.9, 2.0, 2.1)], None, "REPRODUCED"),
        ("UpTo", (2,), [(1.9, 2.0)], None, "NOT"),  # two seeds have no interval
        ("UpTo", (2,), [2.82], None, "REPRODUCED"),  # 2 to the power of 1.5 is 2.828
        ("UpTo", (2,), [2.83], None, "DIRECTION"),
        ("Between", (2, 4), [1.8, 3.6], None, "REPRODUCED"),
        ("Between", (2, 4), [3.6, 1.8, 2.5], None, "REPRODUCED"),
        ("Between", (2, 4), [1.79, 3.6], None, "DIRECTION"),
        ("Between", (2, 4), [1.8, 3.59], None, "DIRECTION"),
        ("Between", (2, 4), [1.415, 7.9], None, "DIRECTION"),
        ("Between", (2, 4), [1.8, 8.1], None, "DIRECTION"),  # 4 to the power of 1.5 is 8
        ("Between", (2, 4), [1.414, 4.0], None, "NOT"),
        ("Between", (2, 4), [1.8, 1.99], None, "NOT"),  # the root of 4 is 2
        ("Between", (2, 4), [1.0, 9.0], None, "NOT"),
        ("Between", (2, 4), [(0.9, 1.5, 2.1), 4.0], None, "NOT"),
        ("AtMost", (6,), [6, 2], None, "REPRODUCED"),
        ("AtMost", (6,), [6.01, 2], None, "NOT"),
        ("AtMost", (6,), [6.01, 2], [7, 3], "DIRECTION"),
        ("AtMost", (6,), [6.01, 2], [6.02, 3], "NOT"),  # not half of the way from 6.02 to 6
        ("AtMost", (6,), [6.01, 2], [7, 1.9], "NOT"),
        ("AtMost", (6,), [6.01, 2], [7, ()], "NOT"),
        ("AtLeast", (0.5, "%"), [0.5, 0.9], None, "REPRODUCED"),
        ("AtLeast", (0.5, "%"), [0.499, 0.9], None, "NOT"),
        ("AtLeast", (0.5, "%"), [0.449, 0.9], [0.4, 0.8], "DIRECTION"),
        ("AtLeast", (0.5, "%"), [0.44, 0.9], [0.4, 0.8], "NOT"),  # the geometric mean of 0.4 and 0.5 is 0.447
        ("AtLeast", (0.5, "%"), [0.449, 0.9], [0.4, 0.95], "NOT"),
        ("Keeps", (0.25,), [0.25], None, "REPRODUCED"),
        ("Keeps", (0.25,), [0.396], None, "REPRODUCED"),  # 0.25 to the power of 2/3 is 0.397
        ("Keeps", (0.25,), [0.398], None, "DIRECTION"),
        ("Keeps", (0.25,), [0.22], None, "DIRECTION"),
        ("Keeps", (0.25,), [0.0626], None, "DIRECTION"),  # loses twice as much
        ("Keeps", (0.25,), [0.0624], None, "NOT"),
        ("Equal", (), [4, 2], [4, 2], "REPRODUCED"),
        ("Equal", (), [100, 2], [100.9, 2], "REPRODUCED"),
        ("Equal", (), [100, 2], [101.1, 2], "NOT"),
        ("Equal", (), [100, 2], [98.9, 2], "NOT"),
        ("Within", (), [1.3, 1.1], [1.3, 1.2], "REPRODUCED"),
        ("Within", (), [1.301, 1.1], [1.3, 1.2], "NOT"),
        ("InnerBest", (), [(3, 3, 3.1), (1, 1, 1.1), (2, 2, 2.1)], None, "REPRODUCED"),
        ("InnerBest", (), [(3, 3, 3.1), (2, 2, 2.1), (1, 1, 1.1)], None, "DIRECTION"),
        ("InnerBest", (), [(3, 3, 3.1), (1, 1, 1.1), (0.9, 3.0, 1.0)], None, "DIRECTION"),
        ("InnerBest", (), [(1, 1, 1.1), (2, 2, 2.1), (3, 3, 3.1)], None, "NOT"),
        ("InnerBest", (), [(1, 3, 2.0), (2, 1, 1.1), (3, 3, 3.1)], None, "NOT"),
    ],
)
def test_verdicts_at_the_borders(name: str, words: Any, values: list[Any], rivals: Any, wanted: str) -> None:
    assert verdict(figures(*values, against=rivals), name, *words) == wanted


@pytest.mark.parametrize(
    ("ours", "theirs", "wanted"),
    [
        ((0.9, 0.8, 0.7), (0.9, 0.8, 0.7), "REPRODUCED"),
        ((0.991, 0.991, 0.991), (1.0, 1.0, 1.0), "WORSE"),  # within 1%, but the interval excludes equality
        ((0.991, 1.0, 1.008), (1.0, 1.0, 1.0), "DIRECTION"),  # the interval reaches from below -1% to above 0
        ((0.989, 0.989, 0.989), (1.0, 1.0, 1.0), "NOT"),
        ((-101.1, -101.1, -101.1), (-100, -100, -100), "NOT"),  # a metric of which less is better
        ((0.97, 1.0, 1.02), (1.0, 1.0, 1.0), "DIRECTION"),  # -0.3% on average
        ((0.90, 1.0, 1.01), (1.0, 1.0, 1.0), "UNJUDGED"),  # -3%, but anything may be behind it
        ((0.80, 0.61, 0.72), (0.9, 0.71, 0.82), "NOT"),  # seeds differ more than methods do: only pairs tell
        ((1.5, 1.6, 1.4), (1.0, 1.0, 1.0), "REPRODUCED"),
        ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), "REPRODUCED"),
    ],
)
def test_no_loss(ours: Any, theirs: Any, wanted: str) -> None:
    assert verdict(figures(ours, against=[theirs]), "NoLoss") == wanted


def test_the_worst_case_counts() -> None:
    same, worse = (1.0, 1.0, 1.0), (0.5, 0.5, 0.5)
    found = rule("NoLoss").judge(figures(same, worse, same, against=[same] * 3))
    assert (found.verdict.name, found.reason) == ("NOT", "b: worse by 50.00%, beyond the spread of seeds")


@pytest.mark.parametrize(("alone", "passes"), [((0.9, 0.91, 0.92), True), ((0.6, 0.61, 0.62), False)])
def test_the_result_of_a_single_worker_is_reported(alone: tuple[float, ...], passes: bool) -> None:
    """Where it passes the same test, a method that passes has only done no harm."""
    (ours,) = figures((0.9, 0.91, 0.92), against=[(0.9, 0.91, 0.92)])
    without, with_floor = (rule("NoLoss").judge([each]) for each in (ours, ours._replace(floor=alone)))
    assert with_floor.verdict is without.verdict
    assert "single worker" not in without.reason
    assert ("it passes the same test" in with_floor.reason) == passes
    assert f"single worker without communication: {'0%' if passes else '-32.97%'}" in with_floor.reason


@pytest.mark.parametrize(
    ("values", "wanted", "reason"),
    [
        ([(3, 3.1, 3), (2, 2, 2.1), (1, 1, 1.1)], "REPRODUCED", "a less b: 1 ("),
        ([(3, 3.1, 3), (1, 2, 3.0), (1, 1, 1.1)], "DIRECTION", "not every difference"),
        ([(3, 3.1, 3), (3.2, 3.1, 3.2), (1, 1, 1.1)], "NOT", "no such order"),
        ([(3, 1, 2), (2, 3, 1), (1, 2, 3)], "NOT", "no such order beyond the spread of seeds"),
        ([(1, 1, 1.1), (2, 2, 2.1), (3, 3.1, 3)], "NOT", "in part the opposite order"),
        ([(2, 2, 2.0), (3, 3.1, 3), (1, 1, 1.1)], "NOT", "in part the opposite order"),
    ],
)
def test_order(values: list[Any], wanted: str, reason: str) -> None:
    found = rule("Order").judge(figures(*values))
    assert (found.verdict.name, found.reason[: len(reason)]) == (wanted, reason)


@given(st.lists(RATIOS, min_size=1, max_size=5), RATIOS)
def test_a_better_figure_spoils_a_verdict_by_an_overshoot_only(values: list[float], more: float) -> None:
    before, after = (rule("UpTo", 3.0).judge(figures(*each)) for each in (values, [*values, more]))
    assert after.overshoot or RANK[after.verdict.name] <= RANK[before.verdict.name]
    assert after.overshoot == (max(*values, more) > 3**1.5)


@pytest.mark.parametrize(
    ("name", "words", "value"), [("UpTo", (1.75,), 3.4), ("Between", (1.13, 1.75), 3.4), ("Keeps", (0.763,), 0.929)]
)
def test_an_overshoot_is_flagged(name: str, words: Any, value: float) -> None:
    """The load that balancing gained 3.4x where 1.75x is published, and the scaling that dense training has, too."""
    found = rule(name, *words).judge(figures(value))
    assert found.label == "in the same direction, overshoot"
    assert found.reason.startswith("far beyond the published figure: ")
    assert not rule(name, *words).judge(figures(*words)).overshoot


@given(SEEDS, st.floats(0, 50), st.floats(0, 50))
def test_a_greater_loss_is_never_judged_better(seeds: list[float], loss: float, more: float) -> None:
    lost, worse = ([seed - each for seed in seeds] for each in (loss, loss + more))
    verdicts = [verdict(figures(each, against=[seeds]), "NoLoss") for each in (lost, worse)]
    assert RANK[verdicts[0]] <= RANK[verdicts[1]]


@given(SEEDS, SEEDS)
def test_an_order_and_its_opposite_are_never_both_there(one: list[float], other: list[float]) -> None:
    assert [verdict(figures(*pair), "Order") for pair in ((one, other), (other, one))].count("REPRODUCED") < 2
