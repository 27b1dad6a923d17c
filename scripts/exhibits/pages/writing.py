"""Writes the tables and figures of an exhibit to files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

from scripts.exhibits.base import Exhibit, Results
from scripts.exhibits.charts.axes import SIZE, TEXT, drawing
from scripts.exhibits.charts.labels import explain
from scripts.exhibits.tables import WRITERS, Table
from scripts.exhibits.unrun import without_unrun
from spardl.basics.files import write_atomically

__all__ = ["write"]

ENDINGS = ("png", "pdf")
# Characters of a title in one line.
LINE = 62
# Inches.
LINE_HEIGHT = 0.19


def write(exhibit: Exhibit, scale: str, results: Results, folder: Path) -> Sequence[Table]:
    """Writes tables and figures, and returns the tables; rows that were not run are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    tables = without_unrun(exhibit.tables(scale, results))
    for number, table in enumerate(tables, 1):
        for ending, writer in WRITERS.items():
            path = folder / f"{exhibit.name}-{scale}-{number}.{ending}"
            write_atomically(path, writer(table).encode())
    _draw(exhibit, scale, results, folder)
    return tables


def _draw(exhibit: Exhibit, scale: str, results: Results, folder: Path) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415 - only figures need it

    for picture in exhibit.pictures(scale, results):
        with drawing():
            figure = Figure(figsize=SIZE, layout="constrained")
            picture.draw(figure)
            title = fill(picture.title or picture.caption, LINE)
            figure.suptitle(title, fontsize=TEXT)
            explain(figure, picture.key)
            # Adds the height of title and legend, so that the plot keeps its size.
            lines = title.count("\n") + 1 + (len(picture.key) + 1) // 2
            figure.set_figheight(figure.get_figheight() + LINE_HEIGHT * lines)
            for ending in ENDINGS:
                figure.savefig(folder / f"{exhibit.name}-{scale}-{picture.file}.{ending}", dpi=200)
