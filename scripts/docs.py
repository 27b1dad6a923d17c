"""Renders every generated page and table of the documentation, and its figures.

python scripts/docs.py --list                    name the files and what each is made from
python scripts/docs.py --check                   write nothing; exit with 1 if a page is out of date
python scripts/docs.py --write                   some minutes, most of them for the pages in docs/tables/
python scripts/docs.py --write docs/methods.md spardl/method/names.py     only these files

Trains and measures nothing: figures come from the records in docs/results/, profiles in scripts/profiles/ and the
methods themselves. docs/tables/claims.md is a Jinja2 template (docs/tables/claims.md.j2). In all other pages, tables
are between two marks, <!-- NAME: written by scripts/docs.py --> and <!-- end of NAME -->, and the rest is written by
hand. A figure is drawn by --write; --check only requires that it exists.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, cast

import torch

from scripts import choices, learning
from scripts.benchmarks import hooks
from scripts.choices import answer
from scripts.evidence.overviews import figure
from scripts.evidence.plans import overview_in
from scripts.exhibits.base import Exhibit, Results
from scripts.exhibits.catalogue import catalogue
from scripts.exhibits.claims.catalogue import OnDemand, judge_all
from scripts.exhibits.claims.catalogue import page as claims_page
from scripts.exhibits.kinds.frontier import Frontier
from scripts.exhibits.kinds.races import Race
from scripts.exhibits.records import SHIPPED, RecordStore, on_record
from scripts.exhibits.tables import replace_section
from scripts.pages import break_even, methods
from scripts.pages.exhibits import (
    FRONTIER_SCALE,
    MARK,
    accuracy_figure,
    frontier_figure,
    frontier_page,
    quoting_page,
)
from spardl.basics.errors import ConfigError
from spardl.basics.files import write_atomically

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / SHIPPED
CURRENT, OUT_OF_DATE = 0, 1
COMMAND = "python scripts/docs.py --write"


class Page(NamedTuple):
    """A generated page or a page with generated sections.

    Attributes:
        source: Description of the sources of the page, for --list.
        render: Gives the current text, from the text of the file ("" if the file does not exist).
    """

    source: str
    render: Callable[[str], str]


def _learning_page(path: str, text: str) -> str:
    return learning.page(path, text, on_record(RECORDS / "learning.jsonl"))


def _hooks_page(text: str) -> str:
    shown = hooks.shown(json.loads((RECORDS / "torch-hooks.json").read_text()))
    return replace_section(text, "hooks", f"\n{shown}\n")


def _frontier() -> tuple[Frontier, Results]:
    exhibit = cast(Frontier, _exhibits()["frontier"])
    return exhibit, Results.on_disk(RECORDS, exhibit.jobs(FRONTIER_SCALE), RecordStore(RECORDS))


def _frontier_page(text: str) -> str:
    return frontier_page(text, *_frontier())


def _claims_page(_: str) -> str:
    with choices.composing():
        judgements = judge_all(_exhibits(), "evening", OnDemand(RECORDS, store=RecordStore(RECORDS)))
    return claims_page(judgements, "evening", f"{COMMAND} docs/tables/claims.md")


def _reliability_page(text: str) -> str:
    from tests.injections import record  # noqa: PLC0415 - needs pytest, which users of the other pages may lack

    return record.page(text, record.read_results())


def _quoting_page(text: str) -> str:
    with choices.composing():
        return quoting_page(text, _exhibits(), RECORDS)


@cache
def _exhibits() -> Mapping[str, Exhibit]:
    return catalogue()


_LEARNING = "docs/results/learning.jsonl"
PAGES: Mapping[str, Page] = MappingProxyType(
    {
        "docs/choosing-a-method.md": Page(_LEARNING, partial(_learning_page, "docs/choosing-a-method.md")),
        "docs/methods.md": Page("the methods and scripts/pages/methods.yaml", methods.generate),
        "docs/reliability.md": Page("docs/results/injections.json", _reliability_page),
        "docs/tables/break-even.md": Page("scripts/profiles/*.json", break_even.page),
        "docs/tables/claims.md": Page("docs/tables/claims.md.j2 and docs/results/*.jsonl", _claims_page),
        "docs/tables/frontier.md": Page("docs/results/laptop.jsonl", _frontier_page),
        "docs/tables/learning.md": Page(_LEARNING, partial(_learning_page, "docs/tables/learning.md")),
        "docs/tables/torch-hooks.md": Page("docs/results/torch-hooks.json", _hooks_page),
        "spardl/method/names.py": Page("the methods", lambda _: methods.names()),
    }
)
QUOTING = Page("docs/results/*.jsonl", _quoting_page)


def _accuracy_figure() -> bytes:
    with choices.composing():
        return accuracy_figure(cast(Race, _exhibits()["spardl.time_to_accuracy"]), RECORDS)


def _frontier_figure() -> bytes:
    return frontier_figure(*_frontier())


def _learning_figure() -> bytes:
    return figure(overview_in(learning.PLANS), on_record(RECORDS / "learning.jsonl"))


FIGURES: Mapping[str, Callable[[], bytes]] = MappingProxyType(
    {
        "docs/images/frontier.png": _frontier_figure,
        "docs/images/learning.png": _learning_figure,
        "docs/images/time-to-accuracy.png": _accuracy_figure,
    }
)


def pages() -> dict[str, Page]:
    """Returns all generated pages by path, including every page that quotes tables of exhibits."""
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "docs").rglob("*.md")}
    quoting = {name: QUOTING for name, text in texts.items() if MARK.search(text)}
    if both := quoting.keys() & PAGES.keys():
        raise ConfigError(
            f"{min(both)} is generated, so it must not quote tables of exhibits; remove the marks of the quoted tables"
        )
    return dict(sorted({**PAGES, **quoting}.items()))


def chosen(names: list[str], known: list[str]) -> list[str]:
    """Returns the named files, or all.

    Raises:
        ConfigError: If a name is not that of a generated file.
    """
    if wrong := [name for name in names if name not in known]:
        raise ConfigError(f"{wrong[0]} is not a generated file; choose one from python scripts/docs.py --list")
    return names or known


def stale(name: str, page: Page, *, write: bool) -> bool:
    """Whether a file is not current; with ``write``, it is written then.

    Raises:
        ConfigError: If a mark or a record is invalid.
        OSError: If the file cannot be read or written.
    """
    path = ROOT / name
    before = path.read_text() if path.is_file() else ""
    text = page.render(before)
    if write and text != before:
        write_atomically(path, text.encode())
    return text != before


def act(arguments: argparse.Namespace) -> int:
    """Lists, writes or checks the chosen files.

    Returns:
        The exit code.

    Raises:
        ConfigError: If a file is not generated, or a mark or a record is invalid.
        OSError: If a file cannot be read or written.
    """
    known = pages()
    names = chosen(arguments.files, [*known, *FIGURES])
    code = CURRENT
    for name in names:
        if arguments.list:
            print(f"{name:<34}{known[name].source if name in known else 'docs/results/*.jsonl (figure)'}")
        elif name in FIGURES:
            if arguments.write:
                write_atomically(ROOT / name, FIGURES[name]())
            elif not (ROOT / name).is_file():
                code = _report(name, "does not exist")
        elif stale(name, known[name], write=arguments.write) and arguments.check:
            code = _report(name, "is out of date")
    return code


def _report(name: str, wrong: str) -> int:
    print(f"error: {name} {wrong}; write it with {COMMAND} {name}", file=sys.stderr, flush=True)
    return OUT_OF_DATE


def main() -> int:
    """Runs the command line.

    Returns:
        The exit code: 1 if a page is out of date, 2 if the input is wrong.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    doing = parser.add_mutually_exclusive_group(required=True)
    doing.add_argument("--list", action="store_true", help="name the files and what each is made from")
    doing.add_argument("--write", action="store_true", help="write the files")
    doing.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is out of date")
    parser.add_argument("files", nargs="*", metavar="FILE", help="path from the root of the repository (default: all)")
    torch.set_num_threads(1)
    return answer(act, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
