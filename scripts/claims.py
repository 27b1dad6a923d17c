"""Judges the claims of the papers by results on disk and fixed rules (scripts/exhibits/claims/).

python scripts/claims.py
python scripts/claims.py --outputs outputs --write claims.md
python scripts/claims.py --outputs outputs --report report

Runs nothing: scripts/reproduce.py computes missing results; claims without results are not judged. A page (--write) is
made from the records in the repository alone, unless --outputs names a folder of runs; otherwise results in outputs/
take precedence over records. scripts/docs.py writes and checks docs/tables/claims.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from scripts import choices
from scripts.exhibits.base import SCALES
from scripts.exhibits.claims.catalogue import OnDemand, claims_section, judge_all, page, tables_of
from scripts.exhibits.pages.sections import add, key
from scripts.exhibits.papers.catalogue import catalogue
from scripts.exhibits.records import SHIPPED, RecordStore
from scripts.exhibits.tables import markdown
from scripts.exhibits.working import FINISHED, answer
from spardl.basics.files import write_atomically

OUTPUTS = Path("outputs")


def act(arguments: argparse.Namespace) -> int:
    """Prints the claims, and writes the page or the section of a report.

    Returns:
        The exit code.

    Raises:
        ConfigError: If a record is invalid.
        OSError: If the page or the report cannot be written.
    """
    exhibits, path = catalogue(), arguments.write
    outputs = arguments.outputs or (None if path else OUTPUTS)
    with choices.composing():
        results = OnDemand(
            outputs or arguments.records, store=RecordStore(arguments.records)
        )  # the folder of records holds no runs
        judgements = judge_all(exhibits, arguments.scale, results)
        section = claims_section(judgements, arguments.scale, results)
    if path:
        where = f" --outputs {outputs.as_posix()}" if outputs else ""
        command = f"python scripts/claims.py --scale {arguments.scale}{where} --write {path.as_posix()}"
        write_atomically(path, page(judgements, arguments.scale, outputs, command).encode())
    if arguments.report:
        add(arguments.report, [section], [key(name, scale) for name in ("claims", *exhibits) for scale in SCALES])
    for table in tables_of(judgements):
        print(f"{table.title}\n\n{markdown(table)}")
    return FINISHED


def main() -> int:
    """Runs the command line, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=SCALES, default="evening", help="size of the results (default: evening)")
    parser.add_argument("--outputs", type=Path, help=f"folder of the runs (default: {OUTPUTS}; none for a page)")
    parser.add_argument("--records", type=Path, default=SHIPPED, help=f"folder of the records (default: {SHIPPED})")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the page to PAGE")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="add the claims to the report in FOLDER")
    return answer(act, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
