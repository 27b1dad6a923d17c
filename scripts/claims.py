"""Judges the claims of the papers by the results on disk, with verdicts by rule; see scripts/exhibits/claims/.

python scripts/claims.py
python scripts/claims.py --write docs/tables/claims.md
python scripts/claims.py --check
python scripts/claims.py --outputs outputs --report report

Runs nothing: scripts/reproduce.py makes missing results, which are not judged until then. A page (--write, --check)
is made of the records in the repository alone, as in any clone, unless --outputs names a folder of runs; otherwise
results in outputs/ take precedence over records.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from scripts import choices
from scripts.docs.settling import CURRENT, settle
from scripts.exhibits.base import SCALES
from scripts.exhibits.claims.catalogue import OnDemand, claims_section, judge_all, tables_of
from scripts.exhibits.claims.page import page
from scripts.exhibits.pages.sections import add, key
from scripts.exhibits.papers.catalogue import catalogue
from scripts.exhibits.records import SHIPPED, RecordStore
from scripts.exhibits.tables import markdown
from scripts.exhibits.working import answer
from spardl.basics.errors import ConfigError
from spardl.basics.files import write_atomically

PAGE, OUTPUTS = Path("docs/tables/claims.md"), Path("outputs")


def act(arguments: argparse.Namespace) -> int:
    """Prints, writes or checks the claims.

    Returns:
        The exit code.

    Raises:
        ConfigError: if there is no page to check.
    """
    exhibits, path = catalogue(), arguments.write or PAGE
    outputs = arguments.outputs or (None if arguments.write or arguments.check else OUTPUTS)
    with choices.composing():
        results = OnDemand(
            outputs or arguments.records, store=RecordStore(arguments.records)
        )  # the folder of records holds no runs
        judgements = judge_all(exhibits, arguments.scale, results)
        section = claims_section(judgements, arguments.scale, results)
    text = page(judgements, arguments.scale, outputs, path)
    if arguments.check:
        if not path.is_file():
            raise ConfigError(f"{path} does not exist; write it with --write {path}")
        return settle({path: text}, f"--write {path}", check=True)
    if arguments.write:
        write_atomically(path, text.encode())
    if arguments.report:
        add(arguments.report, [section], [key(name, scale) for name in ("claims", *exhibits) for scale in SCALES])
    for table in tables_of(judgements):
        print(f"{table.title}\n\n{markdown(table)}")
    return CURRENT


def main() -> int:
    """Runs the command line.

    Returns:
        The exit code: 1 if the page is out of date.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=SCALES, default="evening", help="size of the results (default: evening)")
    parser.add_argument("--outputs", type=Path, help=f"folder of the runs (default: {OUTPUTS}; none for a page)")
    parser.add_argument("--records", type=Path, default=SHIPPED, help=f"folder of the records (default: {SHIPPED})")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the page to PAGE")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="add the claims to the report in FOLDER")
    parser.add_argument("--check", action="store_true", help=f"write nothing; exit with 1 if {PAGE} is out of date")
    return answer(act, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
