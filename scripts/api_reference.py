"""Writes docs/api.md and the pages of docs/api/: the reference of the library, made from its docstrings.

python scripts/api_reference.py            # writes the pages
python scripts/api_reference.py --check    # writes nothing; exits with 1 if a page is out of date

Which names are on which page is in scripts/docs/api_topics.yaml. The library is read, not imported.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from scripts.docs.api_library import read
from scripts.docs.api_pages import pages
from spardl.basics.errors import ConfigError
from spardl.basics.files import write_atomically

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
TOPICS = ROOT / "scripts" / "docs" / "api_topics.yaml"


def main() -> int:
    """Writes the pages.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    arguments = parser.parse_args()
    try:
        made = pages(read(ROOT, TOPICS))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    old = {
        path.relative_to(DOCS): path.read_text() for path in [DOCS / "api.md", *DOCS.glob("api/*.md")] if path.exists()
    }
    stale = sorted(path for path in made.keys() | old.keys() if made.get(path) != old.get(path))
    if arguments.check:
        print("".join(f"docs/{path} is out of date; run python scripts/api_reference.py\n" for path in stale), end="")
        return int(bool(stale))
    (DOCS / "api").mkdir(exist_ok=True)
    for path in stale:
        if path in made:
            write_atomically(DOCS / path, made[path].encode())
        else:
            (DOCS / path).unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
