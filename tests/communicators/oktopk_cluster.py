"""Simulated workers and gradients for the tests of Ok-Topk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from torch import Tensor

from spardl.communicators import OkTopk
from spardl.compressors import SparseCompressor
from spardl.method.method import Method
from spardl.method.residuals import PartialResidual, Residual
from spardl.vector.sparse import SparseVector, Sum
from tests.support.harness import Bench
from trainer.targets import importable

CONF = Path(__file__).parents[2] / "conf"
WORKERS = [1, 2, 3, 5, 8]
PUBLISHED = ("vgg", "lstm", "bert")


def published(name: str) -> dict[str, Any]:
    """Parts of a configured method."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("train", [f"compressor={name}"])
    return {
        part: instantiate(importable(config[part])) for part in ("compressor", "communicator", "residual", "warmup")
    }


def cluster(
    workers: int,
    length: int,
    compressor: SparseCompressor,
    communicator: OkTopk,
    residual: Residual | None = None,
    dtype: torch.dtype = torch.float64,
) -> Bench:
    return Bench.build(Method(compressor, communicator, residual or PartialResidual()), workers, length, dtype)


def alike(workers: int, length: int, source: torch.Generator) -> list[Tensor]:
    """Gradients of all workers with a common component."""
    common = torch.randn(length, generator=source, dtype=torch.float64)
    return [common + torch.randn(length, generator=source, dtype=torch.float64) for _ in range(workers)]


def count(average: Sum) -> int:
    assert isinstance(average, SparseVector)
    return len(average)
