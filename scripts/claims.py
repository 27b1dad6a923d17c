"""Judges the claims of the papers by results on disk and fixed rules (scripts/exhibits/claims/), and prints verdicts.

python scripts/claims.py
python scripts/claims.py --scale laptop --outputs outputs

Runs nothing: scripts/reproduce.py computes missing results; claims without results are not judged. Results in --outputs
take precedence over records. scripts/docs.py writes and checks docs/tables/claims.md, from records alone, and the
report of "scripts/reproduce.py all" shows the rule and the limits of every claim.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from scripts import choices
from scripts.choices import FINISHED, answer
from scripts.exhibits.base import SCALES
from scripts.exhibits.catalogue import catalogue
from scripts.exhibits.claims.catalogue import OnDemand, judge_all, tables_of
from scripts.exhibits.records import SHIPPED, RecordStore
from scripts.exhibits.tables import markdown


def act(arguments: argparse.Namespace) -> int:
    """Prints the claims, and returns the exit code; raises ConfigError if a record is invalid."""
    with choices.composing():
        results = OnDemand(arguments.outputs, store=RecordStore(arguments.records))
        judgements = judge_all(catalogue(), arguments.scale, results)
    for table in tables_of(judgements):
        print(f"{table.title}\n\n{markdown(table)}")
    return FINISHED


def main() -> int:
    """Runs the command line, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=SCALES, default="evening", help="size of the results (default: evening)")
    parser.add_argument("--outputs", type=Path, default=Path("outputs"), help="folder of the runs (default: outputs)")
    parser.add_argument("--records", type=Path, default=SHIPPED, help=f"folder of the records (default: {SHIPPED})")
    return answer(act, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
