"""Sparse gradient communication for distributed training: methods, clusters, schedules."""

from spardl.clusters import Network, ProcessGroupCluster, SimulatedCluster
from spardl.communicators import AllGather, Backend, Dense, SparDL
from spardl.compressors import NoCompression, TopK
from spardl.errors import SpardlError
from spardl.flat import FlatGradient
from spardl.method import Method
from spardl.residuals import GlobalResidual, LocalResidual, NoResidual, PartialResidual
from spardl.schedules import AfterBackward
from spardl.version import __version__

__all__ = [
    "AfterBackward",
    "AllGather",
    "Backend",
    "Dense",
    "FlatGradient",
    "GlobalResidual",
    "LocalResidual",
    "Method",
    "Network",
    "NoCompression",
    "NoResidual",
    "PartialResidual",
    "ProcessGroupCluster",
    "SimulatedCluster",
    "SparDL",
    "SpardlError",
    "TopK",
    "__version__",
]
