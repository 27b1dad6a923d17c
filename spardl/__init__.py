"""Sparse gradient communication for distributed training: methods, clusters, schedules."""

from spardl.clusters import Network, ProcessGroupCluster, SimulatedCluster
from spardl.communicators import (
    AllGather,
    AllGatherCodes,
    AllGatherDense,
    Backend,
    Dense,
    GTopk,
    OkTopk,
    SparDL,
    TopkDSA,
)
from spardl.compressors import (
    QSGD,
    Cast,
    CountSketch,
    GaussianK,
    NoCompression,
    PowerSGD,
    RandomBlock,
    RandomK,
    ReusedThreshold,
    SampledTopK,
    SignSGD,
    TernGrad,
    Threshold,
    TopK,
)
from spardl.errors import SpardlError
from spardl.flat import FlatGradient
from spardl.method import Method
from spardl.momentum import CorrectedMomentum, LocalMomentum, OptimizerMomentum
from spardl.residuals import GlobalResidual, LocalResidual, NoResidual, PartialResidual, RescaledResidual
from spardl.schedules import AfterBackward, Dear, LayerFusion, MgWfbp, Training, Wfbp
from spardl.version import __version__
from spardl.warmup import Warmup

__all__ = [
    "QSGD",
    "AfterBackward",
    "AllGather",
    "AllGatherCodes",
    "AllGatherDense",
    "Backend",
    "Cast",
    "CorrectedMomentum",
    "CountSketch",
    "Dear",
    "Dense",
    "FlatGradient",
    "GTopk",
    "GaussianK",
    "GlobalResidual",
    "LayerFusion",
    "LocalMomentum",
    "LocalResidual",
    "Method",
    "MgWfbp",
    "Network",
    "NoCompression",
    "NoResidual",
    "OkTopk",
    "OptimizerMomentum",
    "PartialResidual",
    "PowerSGD",
    "ProcessGroupCluster",
    "RandomBlock",
    "RandomK",
    "RescaledResidual",
    "ReusedThreshold",
    "SampledTopK",
    "SignSGD",
    "SimulatedCluster",
    "SparDL",
    "SpardlError",
    "TernGrad",
    "Threshold",
    "TopK",
    "TopkDSA",
    "Training",
    "Warmup",
    "Wfbp",
    "__version__",
]
