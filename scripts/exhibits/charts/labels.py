"""Labels at the ends of lines, placed without overlaps, and legends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from scripts.exhibits.charts import palette
from scripts.exhibits.charts.axes import SMALL
from scripts.exhibits.charts.palette import Look

__all__ = ["End", "explain", "name_ends"]

# Points between a line's end and its name, and between a name and the one below.
GAP, AIR = 5.0, 1.5
# Additional distance in points of a label that was moved, so that its leader line is visible.
ASIDE = 6.0


class End(NamedTuple):
    """End of a line.

    Attributes:
        name: Name of the line.
        x: Horizontal position in data coordinates.
        y: Vertical position in data coordinates.
        color: Colour of the line.
    """

    name: str
    x: float
    y: float
    color: str


def name_ends(axes: Any, ends: Sequence[End]) -> None:
    """Labels each line to the right of its end; call it after everything else is drawn.

    Args:
        axes: Axes of matplotlib, in a figure whose layout adapts to texts.
        ends: Ends of all lines.
    """
    behind = {"facecolor": palette.PAPER, "edgecolor": "none", "pad": 0.6, "alpha": 0.75}
    texts = [
        axes.annotate(
            end.name,
            (end.x, end.y),
            (GAP, 0),
            textcoords="offset points",
            va="center",
            fontsize=SMALL,
            color=end.color,
            bbox=behind,
            zorder=5,
            annotation_clip=False,
        )
        for end in ends
    ]
    _spread(axes, texts)


def _spread(axes: Any, texts: Sequence[Any]) -> None:
    """Moves texts up or down until they do not overlap; leader lines connect moved texts with their line ends."""
    whole = axes.figure.canvas.figure
    whole.draw_without_rendering()
    point, placed = whole.dpi / 72, list[Any]()
    for text in sorted(texts, key=lambda text: float(text.get_window_extent().y0)):
        box = text.get_window_extent()
        # From bottom to top, so that each text has to avoid only those that are already placed.
        shift = _free(box, placed, axes.bbox, AIR * point)
        placed.append(box.translated(ASIDE * point if shift else 0, shift))
        if shift:
            text.set_position((GAP + ASIDE, shift / point))
            _lead(axes, text, shift / point)


def _free(box: Any, placed: Sequence[Any], bounds: Any, air: float) -> float:
    """Smallest upward shift of a box that avoids overlaps, preferably inside the axes."""
    half = (box.height + air) / 2
    ways = [0.0, *(sign * turn * half for turn in range(1, 3 * len(placed) + 2) for sign in (1, -1))]
    clear = []
    for way in ways:
        moved = box.translated(ASIDE * air / AIR if way else 0, way)
        wider = moved.from_extents(moved.x0 - 3 * air, moved.y0 - air / 2, moved.x1 + 3 * air, moved.y1 + air / 2)
        if not any(wider.overlaps(other) for other in placed):
            clear.append((moved.y0 < bounds.y0 or moved.y1 > bounds.y1 + half, way))
    best: float = min(clear, key=lambda found: found[0])[1]  # min keeps the first of equals: the smallest shift
    return best


def _lead(axes: Any, text: Any, up: float) -> None:
    """Draws the leader line from the end of a line to its label."""
    line = {"arrowstyle": "-", "color": text.get_color(), "linewidth": 0.6, "shrinkA": 0, "shrinkB": 1}
    axes.annotate(
        "", text.xy, (GAP + ASIDE - 1, up), textcoords="offset points", arrowprops=line, annotation_clip=False, zorder=4
    )


def explain(figure: Any, key: Mapping[str, Look]) -> None:
    """Draws the legend below a separate figure; a page shows one legend above all panels instead."""
    from matplotlib.lines import Line2D  # noqa: PLC0415 - only figures need it

    if key:
        lines = [
            Line2D([], [], color=look.color, linestyle=look.dash, marker=look.marker, markersize=3.5)
            for look in key.values()
        ]
        # Long handles, so that dashed and solid lines can be distinguished.
        figure.legend(
            lines, list(key), fontsize=SMALL, loc="outside lower center", ncols=2, frameon=False, handlelength=4
        )
