"""Wait-free backpropagation with buckets of a fixed size.

Source: Zhang et al., Poseidon: An Efficient Communication Architecture for Distributed Deep Learning on GPU Clusters,
USENIX ATC 2017; with buckets: Li et al., PyTorch Distributed, VLDB 2020.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from spardl.basics.checks import is_a
from spardl.basics.errors import ConfigError
from spardl.clusters.base import Cluster
from spardl.method.method import Method
from spardl.schedules.base import Schedule
from spardl.schedules.engine import Engine
from spardl.schedules.in_backward import InBackward
from spardl.schedules.partition import by_megabytes
from spardl.schedules.training import Training

__all__ = ["Wfbp", "check_megabytes"]


def check_megabytes(name: str, value: object) -> None:
    """Accepts a size in MB (2^20 bytes), infinity included.

    Raises:
        ConfigError: if it is not a number, at least 0.
    """
    if not is_a(float, value) or not (isinstance(value, int | float) and value >= 0) or math.isnan(value):
        raise ConfigError(f"{name} must be a number of megabytes, at least 0 (0: every layer alone), got {value!r}")


@dataclass(frozen=True)
class Wfbp(Schedule):
    """Sends buckets during the backward pass, from the last layer to the first.

    Args:
        bucket_mb: most megabytes of gradients in a bucket; a layer is never cut. 0: every layer alone.

    Raises:
        ConfigError: if that is not a number, at least 0.
    """

    bucket_mb: float = 25.0

    name = "wfbp"

    def __post_init__(self) -> None:
        check_megabytes("schedule.bucket_mb", self.bucket_mb)

    def make(self, method: Method, cluster: Cluster, training: Training) -> Engine:
        """With buckets filled from the last layer on."""
        return InBackward(method, cluster, training, by_megabytes(training.gradient, self.bucket_mb))
