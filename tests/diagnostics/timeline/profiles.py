"""Profiles, partitions and costs for the tests of the timeline model."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import strategies as st

from spardl.clusters.profile import LayerTimes, Profile
from spardl.diagnostics.timeline.model import Work
from spardl.schedules.fusion import Range

SECONDS = st.floats(0, 10, allow_subnormal=False)


def profile_of(
    entries: list[int], needed: list[float], ready: list[float], update: float = 0.0, tail: float = 0.0
) -> Profile:
    """A profile whose passes last ``tail`` longer than to the last layer."""
    layers = tuple(
        LayerTimes(f"layer{number}", *times) for number, times in enumerate(zip(entries, needed, ready, strict=True))
    )
    return Profile("toy", "none", 1, layers, max(needed) + tail, max(ready) + tail, update)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Up to eight layers, in any order of use."""
    count = draw(st.integers(1, 8))
    columns = [
        draw(st.lists(kind, min_size=count, max_size=count)) for kind in (st.integers(0, 1000), SECONDS, SECONDS)
    ]
    return profile_of(*columns, update=draw(st.floats(0, 1e-3)), tail=draw(SECONDS))


@st.composite
def partitions(draw: st.DrawFn, layers: int) -> list[Range]:
    """Any partition."""
    borders = draw(st.sets(st.integers(1, layers - 1))) if layers > 1 else set()
    return list(pairwise([0, *sorted(borders), layers]))


class LinearWork:
    """Work that grows with the entries."""

    def __init__(self, compress: float, fixed: float, slope: float) -> None:
        self.compress, self.fixed, self.slope = compress, fixed, slope

    def __call__(self, entries: int) -> Work:
        return Work(self.compress * entries, self.fixed + self.slope * entries)


works = st.builds(LinearWork, st.floats(0, 0.01), st.floats(0, 5), st.floats(0, 0.01))
