"""Fields of numbers: one for each place on two scales, with the number in it, and a colour that goes with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from scripts.exhibits.charts import axes as axes_of
from scripts.exhibits.charts.palette import readable

__all__ = ["Fields", "draw_factors"]

# Heights in inches: of a row, and of the margins.
ROW, AROUND = 0.27, 0.65
# Of a field: how far inside of it its frame is, and the line's width in points.
INSIDE, FRAME = 0.07, 1.8


class Fields(NamedTuple):
    """What is in the fields.

    Attributes:
        values: rows from the top down, all above zero.
        columns: what is written below each column.
        rows: what is written beside each row.
        framed: row and column of the fields that have a frame.
    """

    values: Sequence[Sequence[float]]
    columns: Sequence[str]
    rows: Sequence[str]
    framed: Sequence[tuple[int, int]] = ()


def draw_factors(figure: Any, fields: Fields, words: tuple[str, str], span: tuple[float, float]) -> None:
    """Draws factors: the same ratio is the same step of colour.

    Args:
        figure: matplotlib's, to draw into.
        fields: of one panel.
        words: what the columns are, and the rows.
        span: the least and the greatest factor of all panels that stand side by side.
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
