"""Common style of all figures: axes, legends, titles, and logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from textwrap import fill
from typing import Any

from scripts.exhibits.charts import palette
from spardl.basics.errors import ConfigError

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
        "axes.prop_cycle": f"cycler('color', {list(palette.SERIES)})",
        "axes.titlepad": 5,
        "font.size": TEXT,
        "lines.linewidth": 1.5,
    }
    settings.update({name.replace("_", ".", 1): value for name, value in more.items()})
    return rc_context(settings)


def drawn(draw: Callable[[Any], None], key: Mapping[str, palette.Look], title: str = "") -> Any:
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


def explain(figure: Any, key: Mapping[str, palette.Look]) -> int:
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
        axes.spines[side].set_color(palette.SOFT)
    axes.tick_params(labelsize=SMALL, color=palette.SOFT, labelcolor=palette.INK, length=3)
    axes.grid(axis=grid, color=palette.LINE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(across, fontsize=TEXT, color=palette.INK)
    axes.set_title(up, fontsize=TEXT, loc="left", color=palette.INK)


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
