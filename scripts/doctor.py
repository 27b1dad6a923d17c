"""Checks an installation or a cluster within a minute: runs spardl doctor.

python scripts/doctor.py                                         # four workers on this machine
torchrun --nproc-per-node 4 scripts/doctor.py --out network.yaml # those that torchrun, or srun, starts
srun python scripts/doctor.py --interface eth0
"""

from __future__ import annotations

import os
import sys

# The workers' own lines say what matters; torch reads this when it is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

from spardl.clusters.workers.processes import exit_now
from spardl.diagnostics.cli import run
from spardl.diagnostics.commands.doctor import doctor

if __name__ == "__main__":
    exit_now(run(doctor, sys.argv[1:], "doctor.py"))
