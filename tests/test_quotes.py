"""What pages quote of exhibits is what the records give."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import quotes
from scripts.exhibits import base
from scripts.exhibits.papers import spardl_race
from scripts.exhibits.records import SHIPPED, RecordStore
from scripts.exhibits.tables import Cell, Row, Table
from spardl.basics.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
PAGE = """# Page
<!-- some.thing, smoke, table 2: written by scripts/quotes.py --write -->
old
<!-- end of some.thing, smoke, table 2 -->
after
"""


class Made:
    """An exhibit with two tables and no work."""

    def jobs(self, scale: str) -> list[Any]:
        return []

    def tables(self, scale: str, results: Any) -> list[Table]:
        return [Table(scale, ("row", "figure"), [Row(name, [Cell("1")], [])]) for name in ("first", "second")]


EXHIBITS: Any = {"some.thing": Made()}


def test_a_table_is_put_between_its_marks(tmp_path: Path) -> None:
    made = quotes.page(PAGE, EXHIBITS, tmp_path)
    assert made == PAGE.replace("old\n", "\n| row | figure |\n| --- | --- |\n| second | 1 |\n\n")
    assert quotes.page(made, EXHIBITS, tmp_path) == made
    assert quotes.page("no marks", EXHIBITS, tmp_path) == "no marks"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (PAGE.replace("some.thing", "other.thing"), "other.thing, smoke, table 2: there is no such exhibit or scale"),
        (PAGE.replace("smoke", "morning"), "some.thing, morning, table 2: there is no such exhibit or scale"),
        (PAGE.replace("table 2", "table 3"), "table 3: some.thing has tables 1 to 2 at this scale"),
        (PAGE.replace("end of", "the end of"), "a page needs one section"),
    ],
)
def test_marks_that_name_nothing_are_refused(wrong: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        quotes.page(wrong, EXHIBITS, tmp_path)


def test_pages_are_checked_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(quotes, "catalogue", lambda: EXHIBITS)
    (tmp_path / "page.md").write_text(PAGE)

    def script(doing: str) -> int:
        monkeypatch.setattr(sys, "argv", ["quotes.py", doing, f"--pages={tmp_path}", f"--records={tmp_path}"])
        return quotes.main()

    assert script("--check") == 1
    assert capsys.readouterr().err == (
        "error: page.md is out of date; make it again with python scripts/quotes.py --write\n"
    )
    assert (script("--write"), script("--check")) == (0, 0)
    (tmp_path / "page.md").write_text(PAGE.replace("table 2", "table 0"))
    assert script("--write") == 2


def test_the_pages_quote_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["quotes.py", "--check"])
    assert quotes.main() == 0


def test_the_readme_has_the_figures_of_the_records() -> None:
    """Seconds to the target on both links, and megabytes a step; a name here may be shorter."""
    rows = re.findall(r"^\| (.+) \| (\S+) \| (\S+) \| ([\d.]+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    race, names = spardl_race.RACE, dict(zip((row[0] for row in rows), ENTRANTS, strict=True))
    slow, fast = (
        {row.name: dict(zip(table.columns[1:], row.cells, strict=True)) for row in table.rows}
        for table in sorted(
            race.tables("evening", base.Results.on_disk(ROOT, race.jobs("evening"), RecordStore(ROOT / SHIPPED))),
            key=lambda table: "1 Gbit/s" in table.title and "0.1" not in table.title,
        )
    )
    for name, at_slow, at_fast, sent in rows:
        own = names[name]
        for told, cell in ((at_slow, slow[own][UNTIL]), (at_fast, fast[own][UNTIL]), (sent, slow[own][SENT])):
            figure = told.strip("*")
            digits = len(figure.partition(".")[2])
            assert round(cell.value, digits) == float(figure), (name, told, cell)


# The rows of the README's table, in its order, as the exhibit calls them.
ENTRANTS = ("dense DDP", "bf16 (torch)", "PowerSGD (torch)", "SparDL", "SparDL, our recipe", "TopkA, our recipe")
UNTIL, SENT = "seconds to the target", "MB a step"
