"""The background thread of communication, and the end of its process."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from spardl.clusters.process_group import _tensors
from spardl.protocol.programs import Boundary
from spardl.vector.sparse import SparseVector
from tests.support.labs import ROOT

PROGRAM = """
import time
import torch
from spardl.clusters.process_group import Background

Background(torch.device("cpu")).submit(lambda: (time.sleep(1), print("done", flush=True)))
"""


@pytest.mark.slow
def test_a_process_ends_after_its_job() -> None:
    """Without that, the interpreter would be taken down under the thread, which can abort the process."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_tensors_that_leave_the_thread_are_recorded() -> None:
    """On a GPU, the allocator must know the next stream, or it would reuse the memory too early."""
    places, values = torch.tensor([1]), torch.ones(1)
    sparse = SparseVector(places, values, 3)
    for value, wanted in ((values, [values]), (sparse, [places, values]), (Boundary(sparse), [places, values])):
        assert [id(found) for found in _tensors(value)] == [id(each) for each in wanted]
    assert _tensors(None) == []
