"""The timeline against cases worked out by hand, and against laws that hold for every profile."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spardl.basics.errors import ConfigError
from spardl.clusters.profile import Profile
from spardl.diagnostics.timeline.model import (
    Kind,
    Lane,
    Timeline,
    Work,
    after_backward,
    ideal,
    ideal_halves,
    in_backward,
    in_halves,
)
from spardl.schedules.fusion import Range, finish
from tests.diagnostics.timeline.profiles import LinearWork, partitions, profile_of, profiles, works

# Used at 0, 1, 2 of a forward pass of 4 s; ready at 6, 4, 1 of a backward pass of 7 s; updates of 2, 1, 3 s.
TOY = profile_of([2, 1, 3], [0.0, 1.0, 2.0], [6.0, 4.0, 1.0], update=1.0)
TOY = Profile(TOY.model, TOY.device, 1, TOY.layers, 4.0, 7.0, 1.0)
EACH = [(0, 1), (1, 2), (2, 3)]
CLOSE = 1e-9


def spans(timeline: Timeline, kind: Kind) -> list[tuple[float, float]]:
    return [(span.start, span.stop) for span in timeline.spans if span.kind is kind]


def one_second_each(entries: int) -> Work:
    return Work(0.0, float(entries))


def slow(entries: int) -> Work:
    return Work(1.0, 2.0)


def test_after_backward_by_hand() -> None:
    found = after_backward(TOY, one_second_each)
    assert spans(found, Kind.SEND) == [(7, 13)]
    assert spans(found, Kind.UPDATE) == [(13, 19)]
    assert spans(found, Kind.FORWARD) == [(19, 23)]
    assert found.seconds == 23


def test_in_backward_by_hand() -> None:
    """The last layer goes at 1, the next at 4, and the first at 6: its 2 s end 1 s after the backward pass."""
    found = in_backward(TOY, EACH, one_second_each)
    assert spans(found, Kind.SEND) == [(1, 4), (4, 5), (6, 8)]
    assert spans(found, Kind.UPDATE) == [(8, 14)]
    assert found.seconds == 18


def test_group_waits_for_its_layers_and_the_group_behind() -> None:
    found = in_backward(TOY, [(0, 1), (1, 3)], slow)
    assert spans(found, Kind.COMPRESS) == [(4, 5), (7, 8)]
    assert spans(found, Kind.SEND) == [(5, 7), (8, 10)]
    assert found.seconds == 20


def test_layers_that_are_ready_early_do_not_overtake() -> None:
    early = profile_of([1, 1], [0.0, 0.0], [1.0, 5.0])
    assert spans(in_backward(early, [(0, 1), (1, 2)], one_second_each), Kind.SEND) == [(5, 6), (6, 7)]


def test_halves_by_hand() -> None:
    """First halves 1-4, 4-5, 6-8; second ones 8-10, 10-11, 11-14.

    The forward pass waits from 7 to 10, updates 2 s, runs to 1 at 13, updates 1 s, runs to 2 at 15, updates 3 s, and
    runs its last 2 s.
    """
    found = in_halves(TOY, EACH, one_second_each, one_second_each)
    assert spans(found, Kind.SEND) == [(1, 4), (4, 5), (6, 8)]
    assert spans(found, Kind.GATHER) == [(8, 10), (10, 11), (11, 14)]
    assert spans(found, Kind.UPDATE) == [(10, 12), (13, 14), (15, 18)]
    assert spans(found, Kind.FORWARD) == [(12, 13), (14, 15), (18, 20)]
    assert found.seconds == 20


def test_second_halves_wait_for_the_end_of_the_backward_pass() -> None:
    early = profile_of([1, 1], [0.0, 1.0], [1.0, 1.0], tail=4.0)
    found = in_halves(early, [(0, 1), (1, 2)], one_second_each, one_second_each)
    assert spans(found, Kind.SEND) == [(1, 2), (2, 3)]
    assert spans(found, Kind.GATHER) == [(5, 6), (6, 7)]
    assert found.seconds == 6 + 5


def test_the_forward_pass_takes_groups_as_it_needs_them() -> None:
    """The second layer is used first, but the queue is in flat order: it waits for both."""
    crossed = profile_of([3, 1], [2.0, 0.0], [1.0, 1.0])
    found = in_halves(crossed, [(0, 1), (1, 2)], lambda entries: Work(0.0, 0.0), one_second_each)
    assert spans(found, Kind.GATHER) == [(1, 4), (4, 5)]
    assert spans(found, Kind.FORWARD) == [(5, 7)]


def test_a_span_names_its_layers_and_lane() -> None:
    first, second = (s for s in in_backward(TOY, [(0, 2), (2, 3)], one_second_each).spans if s.lane is Lane.NETWORK)
    assert (first.label, second.label) == ("layer2", "layer0 .. layer1")
    assert {kind for kind in Kind if kind.lane is Lane.COMPUTE} == {Kind.BACKWARD, Kind.FORWARD, Kind.UPDATE}


def test_ideals() -> None:
    assert ideal(TOY, 3.0) == 7 + 6 + 4
    assert ideal(TOY, 9.0) == 9 + 6 + 4
    assert ideal_halves(TOY, 3.0, 4.0) == 7 + 10
    assert ideal_halves(TOY, 9.0, 12.0) == 9 + 12


@pytest.mark.parametrize(
    "groups", [[], [(0, 2)], [(0, 4)], [(1, 3)], [(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 0), (0, 3)], [(2, 3), (0, 2)]]
)
def test_groups_that_do_not_cover_the_model(groups: list[Range]) -> None:
    with pytest.raises(ConfigError, match="cover all 3 layers"):
        in_backward(TOY, groups, one_second_each)
    with pytest.raises(ConfigError, match="cover all 3 layers"):
        in_halves(TOY, groups, one_second_each, one_second_each)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Profile, list[Range], LinearWork, LinearWork]:
    profile = draw(profiles())
    return profile, draw(partitions(len(profile.layers))), draw(works), draw(works)


def update_of(profile: Profile) -> float:
    return profile.update * sum(profile.entries)


@given(cases())
def test_lanes_run_every_item_once_and_serially(case: Any) -> None:
    profile, groups, first, second = case
    sizes = [sum(profile.entries[slice(*group)]) for group in groups]
    network = sum(first(size).seconds for size in sizes)
    gathers = sum(second(size).seconds for size in sizes)
    computing = profile.compute + update_of(profile)
    for found, communicating in (
        (after_backward(profile, first), first(sum(sizes)).seconds),
        (in_backward(profile, groups, first), network),
        (in_halves(profile, groups, first, second), network + gathers),
    ):
        assert found.busy(Lane.COMPUTE) == pytest.approx(computing)
        assert found.busy(Lane.NETWORK) == pytest.approx(communicating)
        assert found.seconds >= max(computing, communicating) - CLOSE
        assert found.seconds <= computing + communicating + CLOSE
        for lane in Lane:
            pieces = [span for span in found.spans if span.lane is lane]
            assert all(before.stop <= after.start for before, after in pairwise(pieces))
            assert all(0 <= span.start < span.stop <= found.seconds + CLOSE for span in pieces)


@given(cases())
def test_synchronizations_match_the_partition_functions(case: Any) -> None:
    profile, groups, cost, _ = case
    found = in_backward(profile, groups, cost)
    end = finish(groups, profile.entries, profile.ready, lambda size: cost(size).seconds)
    assert found.seconds == pytest.approx(max(profile.backward, end) + update_of(profile) + profile.forward)


@given(cases())
def test_overlap_of_one_group_is_never_worse_than_none(case: Any) -> None:
    profile, _, cost, _ = case
    together = [(0, len(profile.layers))]
    assert in_backward(profile, together, cost).seconds <= after_backward(profile, cost).seconds + CLOSE


@given(cases())
def test_overlap_without_start_up_is_never_worse_than_none(case: Any) -> None:
    profile, groups, cost, _ = case
    cost.fixed = 0.0
    assert in_backward(profile, groups, cost).seconds <= after_backward(profile, cost).seconds + CLOSE


@given(cases())
def test_halves_beat_second_halves_without_overlap(case: Any) -> None:
    profile, groups, first, second = case
    gathers = sum(second(sum(profile.entries[slice(*group)])).seconds for group in groups)
    found = in_halves(profile, groups, first, second)
    assert found.seconds <= in_backward(profile, groups, first).seconds + gathers + CLOSE


def test_halves_are_slower_if_the_backward_pass_hides_both() -> None:
    """What comes after the backward pass is late if all could have been sent before."""
    roomy = profile_of([1], [0.0], [1.0], tail=9.0)
    assert in_backward(roomy, [(0, 1)], lambda entries: Work(0.0, 4.0)).seconds == 10 + 9
    assert in_halves(roomy, [(0, 1)], lambda _: Work(0.0, 2.0), lambda _: Work(0.0, 2.0)).seconds == 10 + 2 + 9


@given(cases())
def test_nothing_beats_the_ideal_where_all_is_needed_at_once(case: Any) -> None:
    profile, groups, first, second = case
    sizes = [sum(profile.entries[slice(*group)]) for group in groups]
    totals = [sum(cost(size).seconds for size in sizes) for cost in (first, second)]
    start = min(layer.needed for layer in profile.layers)
    assert in_backward(profile, groups, first).seconds >= ideal(profile, totals[0]) - CLOSE
    assert in_halves(profile, groups, first, second).seconds >= ideal_halves(profile, *totals) - start - CLOSE


@given(cases())
def test_a_faster_device_shortens_nothing_but_its_own_lane(case: Any) -> None:
    profile, groups, first, second = case
    fast = profile.stretched(0.5)
    slow_one, fast_one = (in_halves(each, groups, first, second) for each in (profile, fast))
    assert fast_one.seconds <= slow_one.seconds + CLOSE
    assert fast_one.busy(Lane.COMPUTE) == pytest.approx(slow_one.busy(Lane.COMPUTE) / 2)
    assert fast_one.busy(Lane.NETWORK) == pytest.approx(slow_one.busy(Lane.NETWORK))
