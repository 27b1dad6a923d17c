"""Writes the tables and figures of an exhibit to files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scripts.exhibits.base import Exhibit, Results
from scripts.exhibits.charts.axes import drawing, drawn
from scripts.exhibits.tables import WRITERS, Table
from scripts.exhibits.unrun import without_unrun
from spardl.basics.files import write_atomically

__all__ = ["write"]

ENDINGS = ("png", "pdf")


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
    for picture in exhibit.pictures(scale, results):
        with drawing():
            figure = drawn(picture.draw, picture.key, picture.title or picture.caption)
            for ending in ENDINGS:
                figure.savefig(folder / f"{exhibit.name}-{scale}-{picture.file}.{ending}", dpi=200)
