"""Common style of the axes of all figures, and logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

from scripts.exhibits.charts import palette
from spardl.basics.errors import ConfigError

__all__ = ["SIZE", "SMALL", "TEXT", "check_drawing", "drawing", "logarithmic", "plain"]

# Inches; two panels fit side by side on a page, one on a telephone.
SIZE = (4.4, 2.7)
# Font sizes in points: of text, and of numbers at axes.
TEXT, SMALL = 8, 7.5


def check_drawing() -> None:
    """Checks that figures can be drawn; call it before the work that they show.

    Raises:
        ConfigError: if matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("figures need matplotlib, which is not installed: pip install -e '.[report]'")


def drawing(**more: Any) -> Any:
    """Context with the matplotlib settings of all figures.

    Args:
        more: Further settings; the first underscore of a name stands for a dot.
    """
    from matplotlib import rc_context  # noqa: PLC0415 - only figures need it

    settings: dict[Any, Any] = {
        "axes.prop_cycle": f"cycler('color', {[colour.light for colour in palette.SERIES]})",
        "axes.titlepad": 5,
        "font.size": TEXT,
        "lines.linewidth": 1.5,
    }
    settings.update({name.replace("_", ".", 1): value for name, value in more.items()})
    return rc_context(settings)


def plain(axes: Any, across: str = "", up: str = "", grid: str = "both") -> None:
    """Applies the style of the page to axes.

    Args:
        axes: Axes of matplotlib.
        across: Label of the horizontal axis.
        up: Label of the vertical axis; it is written horizontally above the axes, where it is easier to read.
        grid: Grid lines to draw: ``x``, ``y`` or ``both``.
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


def logarithmic(axis: Any, values: Iterable[float], unit: str = "") -> None:
    """Makes an axis logarithmic.

    Args:
        axis: The x or y axis of matplotlib.
        values: Values on this axis; the limits cover those that are positive and finite.
        unit: Unit that follows each number.
    """
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
