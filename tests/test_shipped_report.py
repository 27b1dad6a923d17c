"""The report in the repository says what the records in it say: each table, to the last figure."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import choices
from scripts.exhibits.base import Results
from scripts.exhibits.pages.sections import key, rendered
from scripts.exhibits.papers.catalogue import catalogue
from scripts.exhibits.records import SHIPPED, Shelf

ROOT = Path(__file__).resolve().parents[1]
SCALE = "evening"


@pytest.mark.slow
def test_every_table_of_the_report_is_that_of_the_records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever adds a record makes the report again; its figures are drawn of what the tables are of."""
    monkeypatch.chdir(tmp_path)  # where nothing was trained
    Path("docs").symlink_to(ROOT / "docs")
    report, shelf, old = (SHIPPED / "index.html").read_text(), Shelf(SHIPPED), []
    with choices.composing():
        for name, exhibit in catalogue().items():
            results = Results.on_disk(Path("outputs"), exhibit.jobs(SCALE), shelf)
            tables = rendered(exhibit.tables(SCALE, results), key(name, SCALE), exhibit.basis, results)
            old += [f"{name}, table {place}" for place, table in enumerate(tables, 1) if str(table) not in report]
    again = "python scripts/reproduce.py all --scale evening --done"
    assert not old, f"docs/results/index.html is older than its records ({'; '.join(old)}); make it again: {again}"
