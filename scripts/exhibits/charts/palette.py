"""Colours of figures; a method has the same colour in all of them.

The colours of the series can be distinguished with impaired colour vision and have enough contrast for text. Pages
invert the lightness of figures for readers who prefer dark pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

# Colours of page.css.
PAPER, INK, SOFT, LINE = "#fdfdfb", "#1c2024", "#555b63", "#d8d9d3"
SERIES = (
    "#204ac8",
    "#b05319",
    "#2b7951",
    "#891576",
    "#832eff",
    "#62380c",
    "#1e4542",
    "#77697b",
    "#08080a",
)
# Index into SERIES, by the first word of a name that is listed here. Baselines are grey.
_PLACES: Mapping[str, int] = MappingProxyType(
    {
        **{"spardl": 0, "oktopk": 1, "topkdsa": 2, "topka": 3, "gtopk": 4, "gaussiank": 5, "sketch": 6, "sketches": 6},
        **{"powersgd": 5, "bf16": 6, "alone": 8},
        **{"dense": 7, "none": 7, "dear": 0, "wfbp": 3, "mgwfbp": 2, "ddplike": 7, "layerfusion": 0},
        **{"computation": 7, "compression": 5, "latency": 6, "bandwidth": 3, "communication": 3, "not": 1},
        **{"equal": 7, "plain": 7, "balanced": 0, "fresh": 0, "levelled": 0},
    }
)
_DASHES: Sequence[Any] = ("-", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (9, 2)))
_MARKERS: Sequence[str] = ("o", "s", "^", "D", "v")


class Look(NamedTuple):
    """Line style of a series, the same in all figures: colour ``#rrggbb``, dash and marker of matplotlib."""

    color: str
    dash: Any
    marker: str


def looks(names: Iterable[str]) -> dict[str, Look]:
    """Distinct line styles for the series of one figure, by name.

    Known methods have fixed colours; series with the same colour differ in their dashes. Unknown series get the
    remaining colours in order, one colour for all names with the same text before the first comma.
    """
    listed = list(names)
    known = {name: place for name in listed if (place := _place(name)) is not None}
    left = [place for place in range(len(SERIES)) if place not in known.values()] or list(range(len(SERIES)))
    families = list(dict.fromkeys(_family(name) for name in listed if name not in known))
    found: dict[str, Look] = {}
    used = [0] * len(SERIES)
    for name in listed:
        place = known[name] if name in known else left[families.index(_family(name)) % len(left)]
        variant = used[place] % len(_DASHES)
        found[name] = Look(SERIES[place], _DASHES[variant], _MARKERS[len(found) % len(_MARKERS)])
        used[place] += 1
    return found


def _family(name: str) -> str:
    return name.partition(",")[0]


def _place(name: str) -> int | None:
    words = re.findall(r"[a-z0-9]+", name.lower().replace("-", ""))
    return next((_PLACES[word] for word in words if word in _PLACES), None)


def readable(field: Sequence[float]) -> str:
    """Text colour that can be read on a background: red, green, blue from 0 to 1."""
    red, green, blue, *_ = field
    # Luma (Rec. 709) suffices to tell the dark half of a colour map from the light one.
    return "white" if 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.433 else "black"
