"""Common style of all figures: colours, axes, legends, titles, and logarithmic axes.

A method has the same colour in all figures. The colours of the series can be distinguished with impaired colour vision
and have enough contrast for text. Pages invert the lightness of figures for readers who prefer dark pages.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from textwrap import fill
from types import MappingProxyType
from typing import Any, NamedTuple

from spardl.basics.errors import ConfigError

# Colours of templates/page.css.
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


# Inches; two panels fit side by side on a page, one on a telephone.
SIZE = (4.4, 2.7)
# Font sizes in points: of text, and of numbers at axes.
TEXT, SMALL = 8, 7.5
# Of titles and legends: characters per inch, height of a line in inches, and width of a line sample in characters.
PER_INCH, LINE_HEIGHT, SAMPLE = 14, 0.19, 8


def check_drawing() -> None:
    """Raises ConfigError if matplotlib is not installed; call it before the work that figures show."""
    if find_spec("matplotlib") is None:
        raise ConfigError("figures need matplotlib, which is not installed: pip install -e '.[report]'")


def drawing(**more: Any) -> Any:
    """Context with the matplotlib settings of all figures; the first underscore of a name stands for a dot."""
    from matplotlib import rc_context  # noqa: PLC0415 - only figures need it

    settings: dict[Any, Any] = {
        "axes.prop_cycle": f"cycler('color', {list(SERIES)})",
        "axes.titlepad": 5,
        "font.size": TEXT,
        "lines.linewidth": 1.5,
    }
    settings.update({name.replace("_", ".", 1): value for name, value in more.items()})
    return rc_context(settings)


def drawn(draw: Callable[[Any], None], key: Mapping[str, Look], title: str = "") -> Any:
    """Draws a figure of matplotlib with a legend and a title, if given; call it within :func:`drawing`."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - only figures need it

    figure = Figure(figsize=SIZE, layout="constrained")
    draw(figure)
    words = fill(title, int(PER_INCH * figure.get_figwidth()))
    if title:
        figure.suptitle(words, fontsize=TEXT)
    # Title and legend add to the height, so that the plot keeps its size.
    lines = explain(figure, key) + (words.count("\n") + 1 if title else 0)
    figure.set_figheight(figure.get_figheight() + LINE_HEIGHT * lines)
    return figure


def png(figure: Any) -> bytes:
    """Returns a figure as PNG without the version of matplotlib; call it within :func:`drawing`."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=100, metadata={"Software": None})
    return out.getvalue()


def explain(figure: Any, key: Mapping[str, Look]) -> int:
    """Draws the legend below a figure or a part of one, unless the key is empty; returns its height in lines."""
    from matplotlib.lines import Line2D  # noqa: PLC0415 - only figures need it

    if not key:
        return 0
    most = int(PER_INCH * figure.bbox.width / figure.figure.dpi)
    names = [fill(name, most - SAMPLE) for name in key]
    longest = max(len(line) for name in names for line in name.split("\n"))
    columns = max(1, min(len(names), most // (longest + SAMPLE)))
    lines = [
        Line2D([], [], color=look.color, linestyle=look.dash, marker=look.marker, markersize=3.5)
        for look in key.values()
    ]
    # Long handles, so that dashed and solid lines can be distinguished.
    figure.legend(
        lines, names, fontsize=SMALL, loc="outside lower center", ncols=columns, frameon=False, handlelength=4
    )
    return -(-sum(name.count("\n") + 1 for name in names) // columns)


def plain(axes: Any, across: str = "", up: str = "", grid: str = "both") -> None:
    """Applies the style of the page to axes, with grid lines ``x``, ``y`` or ``both``.

    The label of the vertical axis is written horizontally above the axes, where it is easier to read.
    """
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(SOFT)
    axes.tick_params(labelsize=SMALL, color=SOFT, labelcolor=INK, length=3)
    axes.grid(axis=grid, color=LINE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(across, fontsize=TEXT, color=INK)
    axes.set_title(up, fontsize=TEXT, loc="left", color=INK)


def rows_from_the_top(axes: Any, names: Sequence[str]) -> None:
    """Makes the vertical axis that of named rows at 0, 1, and so on, the first on top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)


def logarithmic(axis: Any, values: Iterable[float], unit: str = "") -> None:
    """Makes an axis logarithmic; its limits cover the positive finite values, and a unit follows each number."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator  # noqa: PLC0415 - only figures need it

    found = [value for value in values if value > 0 and math.isfinite(value)]
    if not found:
        return
    low, high = min(found) / 1.08, max(found) * 1.08
    axis.axes.set(**{f"{axis.axis_name}scale": "log", f"{axis.axis_name}lim": (low, high)})
    wide = high / low
    steps = (1.0,) if wide > 300 else (1.0, 3.0) if wide > 30 else (1.0, 2.0, 5.0)
    axis.set_major_locator(LogLocator(subs=steps) if wide > 5 else MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}{unit}"))
