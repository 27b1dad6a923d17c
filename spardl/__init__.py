"""Sparse gradient communication for distributed training: methods, clusters, schedules."""

from spardl.advice import Advice, Choice, advise
from spardl.clusters import Network, ProcessGroupCluster, SimulatedCluster
from spardl.collective import Reduced, all_reduce
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
from spardl.ddp import Hook, attach, hook
from spardl.errors import ConfigError, PeerError, SpardlError
from spardl.flat import FlatGradient
from spardl.method import Method
from spardl.momentum import CorrectedMomentum, LocalMomentum, OptimizerMomentum
from spardl.recipes import Recipe, make_method, method_names
from spardl.residuals import GlobalResidual, LocalResidual, NoResidual, PartialResidual, RescaledResidual
from spardl.schedules import AfterBackward, Dear, LayerFusion, MgWfbp, Training, Wfbp
from spardl.stats import Stats
from spardl.synchronizer import Synchronizer
from spardl.version import __version__
from spardl.warmup import Warmup
from spardl.wire import Wire

__all__ = [
    "QSGD",
    "Advice",
    "AfterBackward",
    "AllGather",
    "AllGatherCodes",
    "AllGatherDense",
    "Backend",
    "Cast",
    "Choice",
    "ConfigError",
    "CorrectedMomentum",
    "CountSketch",
    "Dear",
    "Dense",
    "FlatGradient",
    "GTopk",
    "GaussianK",
    "GlobalResidual",
    "Hook",
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
    "PeerError",
    "PowerSGD",
    "ProcessGroupCluster",
    "RandomBlock",
    "RandomK",
    "Recipe",
    "Reduced",
    "RescaledResidual",
    "ReusedThreshold",
    "SampledTopK",
    "SignSGD",
    "SimulatedCluster",
    "SparDL",
    "SpardlError",
    "Stats",
    "Synchronizer",
    "TernGrad",
    "Threshold",
    "TopK",
    "TopkDSA",
    "Training",
    "Warmup",
    "Wfbp",
    "Wire",
    "__version__",
    "advise",
    "all_reduce",
    "attach",
    "hook",
    "make_method",
    "method_names",
]
