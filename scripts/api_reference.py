"""Writes the reference of the library, docs/api.md and docs/api/, and the type of its methods' names.

python scripts/api_reference.py            # writes the pages
python scripts/api_reference.py --check    # writes nothing; exits with 1 if a page is out of date

Which names are on which page is in scripts/docs/api_topics.yaml. The pages are made from the source, which is read; the
names of methods (spardl/method/api_names.py) are those that the library, imported, knows.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from scripts.docs import api_names
from scripts.docs.api_library import read
from scripts.docs.api_pages import pages
from spardl.basics.errors import ConfigError
from spardl.basics.files import write_atomically
from spardl.method.recipes import recipes

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
TOPICS = ROOT / "scripts" / "docs" / "api_topics.yaml"
NAMES = ROOT / api_names.MODULE


def main() -> int:
    """Writes the pages.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    arguments = parser.parse_args()
    try:
        named = _names(write=not arguments.check)
        made = pages(read(ROOT, TOPICS))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    old = {
        path.relative_to(DOCS): path.read_text() for path in [DOCS / "api.md", *DOCS.glob("api/*.md")] if path.exists()
    }
    stale = sorted(path for path in made.keys() | old.keys() if made.get(path) != old.get(path))
    if arguments.check:
        files = [*([] if named else [api_names.MODULE]), *(Path("docs") / path for path in stale)]
        print("".join(f"{path} is out of date; run python scripts/api_reference.py\n" for path in files), end="")
        return int(bool(files))
    (DOCS / "api").mkdir(exist_ok=True)
    for path in stale:
        if path in made:
            write_atomically(DOCS / path, made[path].encode())
        else:
            (DOCS / path).unlink()
    return 0


def _names(*, write: bool) -> bool:
    """Whether the type of the names is up to date; if not, it may be written, before pages are made of it."""
    text = api_names.module(recipes())
    current = NAMES.read_text() == text
    if write and not current:
        write_atomically(NAMES, text.encode())
    return current


if __name__ == "__main__":
    sys.exit(main())
