"""Pages that scripts make: written where they are not as made today, or checked."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from spardl.basics.files import write_atomically

__all__ = ["CURRENT", "OUT_OF_DATE", "add_options", "settle"]

CURRENT, OUT_OF_DATE = 0, 1


def add_options(parser: argparse.ArgumentParser, pages: str, **others: str) -> None:
    """Adds --write and --check, of which one must be given and only one goes.

    Args:
        parser: of the command line.
        pages: what they are called there.
        others: what else the script can do, an option each with its help; then it may also be called without any.
    """
    doing = parser.add_mutually_exclusive_group(required=not others)
    for name, told in others.items():
        doing.add_argument(f"--{name}", action="store_true", help=told)
    doing.add_argument("--write", action="store_true", help=f"write {pages}")
    doing.add_argument("--check", action="store_true", help=f"write nothing; exit with 1 if {pages} would change")


def settle(made: Mapping[Path, str], again: str, *, check: bool) -> int:
    """Writes those pages that are not as made, or, to check, says which they are.

    Args:
        made: the text of each page as it should be.
        again: the command that writes them, for whoever is told that they are out of date.
        check: write nothing.

    Returns:
        The exit code: 1 if, to check, a page is out of date or missing.

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
