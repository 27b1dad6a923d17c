"""Sparse gradient communication for distributed training: methods, clusters, schedules."""

from spardl.basics.errors import ConfigError, PeerError, SpardlError
from spardl.basics.version import __version__
from spardl.clusters import Network, ProcessGroupCluster, SimulatedCluster
from spardl.communicators import (
    AllGather,
    AllGatherCodes,
    AllGatherDense,
    AllReduceCodes,
    Backend,
    Dense,
    GTopk,
    OkTopk,
    SparDL,
    TopkDSA,
)
from spardl.compressors import (
    QSGD,
    ARCTopK,
    ARCTopKEF21,
    Cast,
    CountSketch,
    GaussianK,
    NoCompression,
    PowerSGD,
    Quantized,
    RandomBlock,
    RandomK,
    ReusedThreshold,
    SampledTopK,
    SignSGD,
    TernGrad,
    Threshold,
    TopK,
)
from spardl.diagnostics.choosing import Advice, Choice, advise
from spardl.hooks.averager import Stats
from spardl.hooks.collective import Reduced, all_reduce
from spardl.hooks.hook import Hook, attach, hook
from spardl.hooks.outer import Outer
from spardl.hooks.synchronizer import Synchronizer
from spardl.method.method import Method
from spardl.method.momentum import (
    AdamMomentum,
    AutoMomentum,
    CorrectedMomentum,
    LocalMomentum,
    OptimizerMomentum,
    SgdMomentum,
)
from spardl.method.names import MethodName
from spardl.method.recipes import Option, Recipe, make_method, method_names, method_options
from spardl.method.residuals import GlobalResidual, LocalResidual, NoResidual, PartialResidual, RescaledResidual
from spardl.method.warmup import Warmup
from spardl.schedules import AfterBackward, Dear, LayerFusion, MgWfbp, OuterSteps, Training, Wfbp
from spardl.vector.flat import FlatGradient
from spardl.vector.wire import Wire

__all__ = [
    "QSGD",
    "ARCTopK",
    "ARCTopKEF21",
    "AdamMomentum",
    "Advice",
    "AfterBackward",
    "AllGather",
    "AllGatherCodes",
    "AllGatherDense",
    "AllReduceCodes",
    "AutoMomentum",
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
    "MethodName",
    "MgWfbp",
    "Network",
    "NoCompression",
    "NoResidual",
    "OkTopk",
    "OptimizerMomentum",
    "Option",
    "Outer",
    "OuterSteps",
    "PartialResidual",
    "PeerError",
    "PowerSGD",
    "ProcessGroupCluster",
    "Quantized",
    "RandomBlock",
    "RandomK",
    "Recipe",
    "Reduced",
    "RescaledResidual",
    "ReusedThreshold",
    "SampledTopK",
    "SgdMomentum",
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
    "method_options",
]
