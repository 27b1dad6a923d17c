"""``spardl doctor`` as a module, for ``torchrun -m spardl.diagnostics.doctor``."""

from __future__ import annotations

import sys

from spardl.clusters.workers.processes import exit_now
from spardl.diagnostics.cli import run
from spardl.diagnostics.commands.doctor import doctor

if __name__ == "__main__":
    exit_now(run(doctor, sys.argv[1:], "spardl doctor"))
