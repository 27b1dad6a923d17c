"""Predicts the time of a training step under every schedule, from profiles and a network: runs spardl timeline.

python scripts/timeline.py scripts/profiles/resnet50.json --workers 64 --network ethernet_10g
python scripts/timeline.py scripts/profiles/resnet50.json --compute 0.22 --schedules wfbp,dear --picture timeline.png

Methods are the choices of compressor= here, where spardl timeline has the names of spardl.method_names().
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from scripts import choices
from spardl.diagnostics.cli import run
from spardl.diagnostics.commands.timeline import timeline_command
from spardl.method.method import Method


def made(names: Sequence[str]) -> Mapping[str, Method]:
    """Methods as train.py would build them, past any warm-up."""
    with choices.composing():
        return {name: choices.build(name, "warmup.steps=0") for name in names}


def main() -> int:
    """Predicts what the command line asks for, and returns the exit code."""
    return run(timeline_command(choices.names(), made, "Choices of compressor="), sys.argv[1:], "timeline.py")


if __name__ == "__main__":
    sys.exit(main())
