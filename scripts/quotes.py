"""Puts tables of exhibits, as the records in the repository have them, into the pages that quote them.

python scripts/quotes.py --write
python scripts/quotes.py --check        exit code 1 if a page is not that of the records

A page quotes a table between two marks, which name the exhibit, the scale, and which of its tables:

<!-- spardl.residuals, evening, table 1: written by scripts/quotes.py --write -->
<!-- end of spardl.residuals, evening, table 1 -->

Runs nothing: what is missing says "not run yet" and is made by scripts/reproduce.py.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from scripts import choices
from scripts.docs.marked import replace
from scripts.docs.settling import add_options, settle
from scripts.exhibits.base import SCALES, Exhibit, Results
from scripts.exhibits.papers.catalogue import catalogue
from scripts.exhibits.records import SHIPPED, RecordStore
from scripts.exhibits.tables import markdown
from scripts.exhibits.working import answer
from spardl.basics.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
MARK = re.compile(r"<!-- (?!end of )(?P<section>(?P<exhibit>\S+), (?P<scale>\w+), table (?P<number>\d+)): ")


def page(text: str, exhibits: Mapping[str, Exhibit], records: Path) -> str:
    """A page with the tables of today's records between its marks.

    Args:
        text: of the page.
        exhibits: all, by name.
        records: the folder of these.

    Raises:
        ConfigError: for an exhibit, a scale or a table that there is not, or a mark without its end.
    """
    for mark in MARK.finditer(text):
        text = replace(text, mark["section"], f"\n{_table(mark, exhibits, records)}")
    return text


def _table(mark: re.Match[str], exhibits: Mapping[str, Exhibit], records: Path) -> str:
    exhibit, scale, number = exhibits.get(mark["exhibit"]), mark["scale"], int(mark["number"])
    if exhibit is None or scale not in SCALES:
        raise ConfigError(f"{mark['section']}: there is no such exhibit or scale; see scripts/reproduce.py --list")
    found = exhibit.tables(scale, Results.on_disk(records, exhibit.jobs(scale), RecordStore(records)))
    if not 1 <= number <= len(found):
        raise ConfigError(f"{mark['section']}: {mark['exhibit']} has tables 1 to {len(found)} at this scale")
    return markdown(found[number - 1])


def act(arguments: argparse.Namespace) -> int:
    """Writes or checks all pages.

    Raises:
        ConfigError: for marks that name nothing, or a record that is none.
        OSError: if a page cannot be read or written.
    """
    with choices.composing():
        exhibits = catalogue()
        texts = {path: path.read_text() for path in sorted(arguments.pages.glob("*.md"))}
        made = {path: page(text, exhibits, arguments.records) for path, text in texts.items() if MARK.search(text)}
    return settle(made, "python scripts/quotes.py --write", check=arguments.check)


def main() -> int:
    """Does what the command line asks for.

    Returns:
        The exit code: 1 if a page is to be made again.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "the pages")
    parser.add_argument("--pages", type=Path, default=ROOT / "docs", help="folder of the pages (default: docs)")
    parser.add_argument("--records", type=Path, default=ROOT / SHIPPED, help=f"folder of the records ({SHIPPED})")
    return answer(act, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
