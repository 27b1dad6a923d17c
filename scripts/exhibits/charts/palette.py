"""Colours of pages and figures, for light and dark backgrounds; a method has the same colour in all figures.

The colours of the series can be distinguished with impaired colour vision and have enough contrast for text.
matplotlib draws with the light variant; pages replace it by CSS variables, which follow the reader's preference.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple


class Colour(NamedTuple):
    """One colour in two variants, each as ``#rrggbb``.

    Attributes:
        light: Variant for light backgrounds.
        dark: Variant for dark backgrounds.
    """

    light: str
    dark: str


# By name of the CSS variable. Each verdict also has its background colour (-paper).
PAGE: Mapping[str, Colour] = MappingProxyType(
    {
        "paper": Colour("#fdfdfb", "#15171a"),
        "panel": Colour("#f4f4f0", "#1d2024"),
        "ink": Colour("#1c2024", "#e3e4e1"),
        "soft": Colour("#555b63", "#a4a9b0"),
        "line": Colour("#d8d9d3", "#353a40"),
        "link": Colour("#1c5796", "#8bb9ec"),
        "good": Colour("#14603a", "#7fd6a4"),
        "good-paper": Colour("#e3f2e8", "#16301f"),
        "half": Colour("#6b5200", "#e0c060"),
        "half-paper": Colour("#f8f0d4", "#332a10"),
        "open": Colour("#4a5058", "#b4b9c0"),
        "open-paper": Colour("#ececea", "#2a2e33"),
        "built": Colour("#2a4d86", "#9dbdf0"),
        "built-paper": Colour("#e6ecf7", "#1a2740"),
        "bad": Colour("#9b1c1c", "#f5a49c"),
        "bad-paper": Colour("#fbebe9", "#3a2022"),
    }
)
SERIES: Sequence[Colour] = (
    Colour("#204ac8", "#6c86d5"),
    Colour("#b05319", "#db6748"),
    Colour("#2b7951", "#97d39e"),
    Colour("#891576", "#c47aad"),
    Colour("#832eff", "#af62ff"),
    Colour("#62380c", "#dec763"),
    Colour("#1e4542", "#66d6ff"),
    Colour("#77697b", "#898a79"),
    Colour("#08080a", "#f8f8f4"),
)
PAPER, INK, SOFT, LINE = (PAGE[name].light for name in ("paper", "ink", "soft", "line"))
# Dark and light text on coloured cells. Pure black and white are avoided, because pages replace them by variables.
ON_FIELDS = ("#000001", "#fffffe")
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
    """Line style of a series, the same in all figures.

    Attributes:
        color: Light variant of the colour, as ``#rrggbb``.
        dash: Line style of matplotlib.
        marker: Marker of matplotlib.
    """

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
        found[name] = Look(SERIES[place].light, _DASHES[variant], _MARKERS[len(found) % len(_MARKERS)])
        used[place] += 1
    return found


def _family(name: str) -> str:
    return name.partition(",")[0]


def _place(name: str) -> int | None:
    words = re.findall(r"[a-z0-9]+", name.lower().replace("-", ""))
    return next((_PLACES[word] for word in words if word in _PLACES), None)


def variables() -> dict[str, str]:
    """CSS variable of each light colour that figures use."""
    own = {PAGE[name].light: f"var(--{name})" for name in ("paper", "panel", "ink", "soft", "line", "bad")}
    return {**own, **{colour.light: f"var(--c{place})" for place, colour in enumerate(SERIES)}}


def css() -> str:
    """All colours as CSS variables; the dark variants apply to screens of readers who prefer dark pages."""
    named = {**PAGE, **{f"c{place}": colour for place, colour in enumerate(SERIES)}}
    light, dark = (
        " ".join(f"--{name}: {getattr(colour, kind)};" for name, colour in named.items()) for kind in ("light", "dark")
    )
    return f":root {{ {light} }}\n@media screen and (prefers-color-scheme: dark) {{\n:root {{ {dark} }}\n}}\n"


def readable(field: Sequence[float]) -> str:
    """Text colour that can be read on a background of matplotlib's colour maps.

    Args:
        field: Red, green and blue of the background, from 0 to 1.
    """
    red, green, blue, *_ = field
    # Luma (Rec. 709) suffices to tell the dark half of a colour map from the light one.
    return ON_FIELDS[1] if 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.433 else ON_FIELDS[0]
