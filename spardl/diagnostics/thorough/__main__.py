"""Entry point of the process that runs one thorough check.

Arguments: name of the check, device, timeout, time limit (both in seconds) and result file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from spardl.clusters.workers.processes import exit_now
from spardl.diagnostics.thorough.outcome import Place, plain
from spardl.diagnostics.thorough.running import all_checks

if __name__ == "__main__":
    name, device, timeout, seconds, file = sys.argv[1:]
    torch.set_num_threads(1)
    check = next(each for each in all_checks() if each.name == name)
    outcome = check.run(Place(device, float(timeout), float(seconds)))
    result = {"verdict": outcome.verdict.value, "text": outcome.text, "figures": plain(outcome.figures)}
    Path(file).write_text(json.dumps(result), encoding="utf-8")
    exit_now(0)
