"""Compression methods: combinations of a compressor, a communicator, a residual rule and a momentum rule.

``make_method`` creates a method by name; :class:`Method` combines given parts.
"""

from spardl.method.method import Method
from spardl.method.momentum import (
    AdamMomentum,
    AutoMomentum,
    CorrectedMomentum,
    LocalMomentum,
    OptimizerMomentum,
    SgdMomentum,
)
from spardl.method.muon import MuonMomentum
from spardl.method.names import MethodName
from spardl.method.recipes import Option, Recipe
from spardl.method.residuals import GlobalResidual, LocalResidual, NoResidual, PartialResidual, RescaledResidual
from spardl.method.warmup import Warmup

__all__ = [
    "AdamMomentum",
    "AutoMomentum",
    "CorrectedMomentum",
    "GlobalResidual",
    "LocalMomentum",
    "LocalResidual",
    "Method",
    "MethodName",
    "MuonMomentum",
    "NoResidual",
    "OptimizerMomentum",
    "Option",
    "PartialResidual",
    "Recipe",
    "RescaledResidual",
    "SgdMomentum",
    "Warmup",
]
