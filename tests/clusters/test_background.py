"""The thread beside the computation, and the end of its process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.labs import ROOT

PROGRAM = """
import time
import torch
from spardl.clusters.background import Background

Background(torch.device("cpu")).submit(lambda: (time.sleep(1), print("done", flush=True)))
"""


@pytest.mark.slow
def test_a_process_ends_after_its_job() -> None:
    """Without that, the interpreter would be taken down under the thread, which can abort the process."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
