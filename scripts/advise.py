"""Recommends a method and a schedule for a model on a network: runs spardl advise.

python scripts/advise.py scripts/profiles/resnet50.json --network 1gbit --workers 8
python scripts/advise.py scripts/profiles/bert_base.json --network network.yaml --workers 16 --compute 0.2
"""

from __future__ import annotations

import sys

from spardl.diagnostics.cli import run
from spardl.diagnostics.commands.advise import advise


def main() -> int:
    """Prints what the command line asks for.

    Returns:
        The exit code.
    """
    return run(advise, sys.argv[1:], "advise.py")


if __name__ == "__main__":
    sys.exit(main())
