"""Workers that third-party libraries recognize as started by a launcher."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from spardl.clusters import ProcessGroupCluster
from tests.support.driver import free_port
from tests.support.harness import run_workers


def imported(module: str, extra: str) -> None:
    """Imports an adapter once for all workers, but not during test collection: it takes seconds."""
    pytest.importorskip(extra, reason=f"needs the extra '{extra}'")
    importlib.import_module(module)


def launched(work: Callable[[], Any], workers: int = 2) -> list[Any]:
    """Calls ``work()`` in ``workers`` processes with a process group and torchrun's variables; returns the results."""
    port = free_port()

    def target(cluster: ProcessGroupCluster) -> Any:
        rank = str(dist.get_rank())
        os.environ.update(
            RANK=rank,
            LOCAL_RANK=rank,
            WORLD_SIZE=str(workers),
            LOCAL_WORLD_SIZE=str(workers),
            GROUP_RANK="0",
            NODE_RANK="0",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            ACCELERATE_USE_CPU="true",
            HF_HUB_OFFLINE="1",
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of the third-party library
            return work()

    return run_workers(workers, target)
