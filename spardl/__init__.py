"""Sparse gradient communication for distributed training.

This package contains the functions that training loops call, and the errors that they catch. Import the parts of
compression methods from ``spardl.compressors``, ``spardl.communicators`` and ``spardl.method``, schedules from
``spardl.schedules``, and process groups and simulated networks from ``spardl.clusters``.
"""

import warnings
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from spardl.basics.errors import ConfigError, PeerError, SpardlError
from spardl.basics.version import __version__
from spardl.diagnostics.advice import advise
from spardl.hooks.collective import all_reduce
from spardl.hooks.hook import attach
from spardl.hooks.outer import Outer
from spardl.hooks.synchronizer import Synchronizer
from spardl.hooks.weights import WeightSync
from spardl.method.method import Method
from spardl.method.recipes import make_method, method_names, method_options

if TYPE_CHECKING:
    from spardl.hooks.fsdp import attach_fsdp

__all__ = [
    "ConfigError",
    "Method",
    "Outer",
    "PeerError",
    "SpardlError",
    "Synchronizer",
    "WeightSync",
    "__version__",
    "advise",
    "all_reduce",
    "attach",
    "attach_fsdp",
    "make_method",
    "method_names",
    "method_options",
]

_MOVED_BY_MODULE = {
    "spardl.clusters": ("Network", "ProcessGroupCluster", "SimulatedCluster"),
    "spardl.communicators": (
        *("AllGather", "AllGatherCodes", "AllGatherDense", "AllReduceCodes", "Backend", "Dense", "GTopk", "OkTopk"),
        *("SparDL", "TopkDSA"),
    ),
    "spardl.compressors": (
        *("QSGD", "ARCTopK", "ARCTopKEF21", "Cast", "CountSketch", "GaussianK", "NoCompression", "PowerSGD"),
        *("Quantized", "RandomBlock", "RandomK", "ReusedThreshold", "SampledTopK", "SignSGD", "TernGrad", "Threshold"),
        "TopK",
    ),
    "spardl.diagnostics": ("Advice", "Choice"),
    "spardl.hooks.averager": ("Stats",),
    "spardl.hooks.collective": ("Reduced",),
    "spardl.hooks.hook": ("Hook", "hook"),
    "spardl.method": (
        *("AdamMomentum", "AutoMomentum", "CorrectedMomentum", "LocalMomentum", "OptimizerMomentum", "SgdMomentum"),
        *("GlobalResidual", "LocalResidual", "NoResidual", "PartialResidual", "RescaledResidual"),
        *("MethodName", "Option", "Recipe", "Warmup"),
    ),
    "spardl.schedules": ("AfterBackward", "Dear", "LayerFusion", "MgWfbp", "OuterSteps", "Training", "Wfbp"),
    "spardl.vector": ("FlatGradient", "Wire"),
}
# Public names of version 0.1 that have moved, and the modules to import them from.
_MOVED: Mapping[str, str] = MappingProxyType(
    {name: module for module, names in _MOVED_BY_MODULE.items() for name in names}
)


def __getattr__(name: str) -> Any:
    if name == "attach_fsdp":
        # Imported on first use: torch.distributed.fsdp takes 0.4 s, the rest of this package 0.1 s.
        return import_module("spardl.hooks.fsdp").attach_fsdp
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MOVED[name]
    warnings.warn(
        f"spardl.{name} is deprecated and will be removed; use `from {module} import {name}`",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(import_module(module), name)
