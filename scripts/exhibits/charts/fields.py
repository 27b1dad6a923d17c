"""Heat maps of factors, with the number in each cell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from scripts.exhibits.charts import axes as axes_of
from scripts.exhibits.charts.palette import readable

__all__ = ["Fields", "draw_factors"]

# Heights in inches: of a row, and of the margins.
ROW, AROUND = 0.27, 0.65
# Frame of a cell: its distance from the edge as a share of the cell, and its line width in points.
INSIDE, FRAME = 0.07, 1.8


class Fields(NamedTuple):
    """Content of a heat map.

    Attributes:
        values: Rows from top to bottom; all values are above zero.
        columns: Labels of the columns.
        rows: Labels of the rows.
        framed: Row and column of each cell with a frame.
    """

    values: Sequence[Sequence[float]]
    columns: Sequence[str]
    rows: Sequence[str]
    framed: Sequence[tuple[int, int]] = ()


def draw_factors(figure: Any, fields: Fields, words: tuple[str, str], span: tuple[float, float]) -> None:
    """Draws a heat map of factors with a logarithmic colour scale.

    Args:
        figure: Figure of matplotlib to draw into.
        fields: Content of the panel.
        words: Labels of the horizontal and the vertical axis.
        span: Smallest and largest factor of all adjacent panels, which share one colour scale.
    """
    from matplotlib.colors import LogNorm  # noqa: PLC0415 - only figures need it

    figure.set_size_inches(axes_of.SIZE[0], AROUND + ROW * len(fields.rows))
    axes = figure.subplots()
    axes_of.plain(axes, *words)
    axes.grid(visible=False)
    axes.tick_params(length=0)
    shown = axes.pcolormesh(fields.values, cmap="viridis", norm=LogNorm(*span), clip_on=False)
    colours = [[readable(shown.cmap(shown.norm(value))) for value in row] for row in fields.values]
    for row, (values, written) in enumerate(zip(fields.values, colours, strict=True)):
        for column, (value, colour) in enumerate(zip(values, written, strict=True)):
            text = f"{value:.3g}\u00d7"
            axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=axes_of.SMALL, color=colour)
    for row, column in fields.framed:
        _frame(axes, row, column, colours[row][column])
    axes.set_xticks([place + 0.5 for place in range(len(fields.columns))], fields.columns)
    axes.set_yticks([place + 0.5 for place in range(len(fields.rows))], fields.rows)
    axes.invert_yaxis()


def _frame(axes: Any, row: int, column: int, colour: str) -> None:
    from matplotlib.patches import Rectangle  # noqa: PLC0415 - only figures need it

    size = 1 - 2 * INSIDE
    axes.add_patch(
        Rectangle((column + INSIDE, row + INSIDE), size, size, fill=False, edgecolor=colour, linewidth=FRAME)
    )
