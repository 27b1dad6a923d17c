"""Writes generated pages, or checks that they are up to date."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from spardl.basics.files import write_atomically

__all__ = ["CURRENT", "OUT_OF_DATE", "add_options", "settle"]

CURRENT, OUT_OF_DATE = 0, 1


def add_options(parser: argparse.ArgumentParser, pages: str, **others: str) -> None:
    """Adds the exclusive options --write and --check, one of which is required.

    Args:
        parser: Parser of the command line.
        pages: Name of the pages in the help.
        others: Further exclusive options with their help; no option is required then.
    """
    doing = parser.add_mutually_exclusive_group(required=not others)
    for name, words in others.items():
        doing.add_argument(f"--{name}", action="store_true", help=words)
    doing.add_argument("--write", action="store_true", help=f"write {pages}")
    doing.add_argument("--check", action="store_true", help=f"write nothing; exit with 1 if {pages} are out of date")


def settle(made: Mapping[Path, str], again: str, *, check: bool) -> int:
    """Writes pages that are out of date, or reports them.

    Args:
        made: Current text of each page.
        again: Command that writes the pages, for the message.
        check: Whether to report instead of writing.

    Returns:
        The exit code: 1 if a check finds a page that is out of date or missing.

    Raises:
        OSError: if a page cannot be read or written.
    """
    changed = [path for path, text in made.items() if not path.is_file() or path.read_text() != text]
    for path in changed:
        if check:
            print(f"error: {path.name} is out of date; make it again with {again}", file=sys.stderr)
        else:
            write_atomically(path, made[path].encode())
    return OUT_OF_DATE if check and changed else CURRENT
