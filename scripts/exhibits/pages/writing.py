"""An exhibit's tables and figures as files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scripts.exhibits.base import Exhibit, Results
from scripts.exhibits.pages.svg import SIZE
from scripts.exhibits.tables import WRITERS, Table
from spardl.basics.files import write_atomically

__all__ = ["write"]

ENDINGS = ("png", "pdf")


def write(exhibit: Exhibit, scale: str, results: Results, folder: Path) -> Sequence[Table]:
    """Writes an exhibit's tables and figures, and returns the tables."""
    folder.mkdir(parents=True, exist_ok=True)
    tables = exhibit.tables(scale, results)
    for number, table in enumerate(tables, 1):
        for ending, writer in WRITERS.items():
            path = folder / f"{exhibit.name}-{scale}-{number}.{ending}"
            write_atomically(path, writer(table).encode())
    _draw(exhibit, scale, results, folder)
    return tables


def _draw(exhibit: Exhibit, scale: str, results: Results, folder: Path) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415

    for picture in exhibit.pictures(scale, results):
        figure = Figure(figsize=SIZE, layout="constrained")
        picture.draw(figure)
        for ending in ENDINGS:
            figure.savefig(folder / f"{exhibit.name}-{scale}-{picture.file}.{ending}", dpi=130)
