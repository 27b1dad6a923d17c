"""What configurations name, by public names; and where the first edition (0.1.0) kept it.

A run's id was made from these places. So that a run keeps its id wherever its parts move, ids are still made from them.
What came later has its public name only, and needs no line here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

__all__ = ["first_edition", "public"]

_TARGET = "_target_"
_PLACES: Mapping[str, str] = MappingProxyType(
    {
        "spardl.AfterBackward": "spardl.schedules.after_backward.AfterBackward",
        "spardl.AllGather": "spardl.communicators.allgather.AllGather",
        "spardl.AllGatherCodes": "spardl.communicators.allgather_codes.AllGatherCodes",
        "spardl.AllGatherDense": "spardl.communicators.allgather_dense.AllGatherDense",
        "spardl.Backend": "spardl.communicators.backend.Backend",
        "spardl.Cast": "spardl.compressors.cast.Cast",
        "spardl.CorrectedMomentum": "spardl.momentum.CorrectedMomentum",
        "spardl.CountSketch": "spardl.compressors.count_sketch.CountSketch",
        "spardl.Dear": "spardl.schedules.dear.Dear",
        "spardl.Dense": "spardl.communicators.dense.Dense",
        "spardl.GTopk": "spardl.communicators.gtopk.GTopk",
        "spardl.GaussianK": "spardl.compressors.gaussiank.GaussianK",
        "spardl.GlobalResidual": "spardl.residuals.GlobalResidual",
        "spardl.LayerFusion": "spardl.schedules.layer_fusion.LayerFusion",
        "spardl.LocalMomentum": "spardl.momentum.LocalMomentum",
        "spardl.LocalResidual": "spardl.residuals.LocalResidual",
        "spardl.MgWfbp": "spardl.schedules.mg_wfbp.MgWfbp",
        "spardl.NoCompression": "spardl.compressors.none.NoCompression",
        "spardl.NoResidual": "spardl.residuals.NoResidual",
        "spardl.OkTopk": "spardl.communicators.oktopk.OkTopk",
        "spardl.OptimizerMomentum": "spardl.momentum.OptimizerMomentum",
        "spardl.PartialResidual": "spardl.residuals.PartialResidual",
        "spardl.PowerSGD": "spardl.compressors.powersgd.PowerSGD",
        "spardl.QSGD": "spardl.compressors.qsgd.QSGD",
        "spardl.RandomBlock": "spardl.compressors.random_block.RandomBlock",
        "spardl.RandomK": "spardl.compressors.random_k.RandomK",
        "spardl.RescaledResidual": "spardl.residuals.RescaledResidual",
        "spardl.ReusedThreshold": "spardl.compressors.reused_threshold.ReusedThreshold",
        "spardl.SampledTopK": "spardl.compressors.dgc.SampledTopK",
        "spardl.SignSGD": "spardl.compressors.signsgd.SignSGD",
        "spardl.SparDL": "spardl.communicators.spardl.SparDL",
        "spardl.TernGrad": "spardl.compressors.terngrad.TernGrad",
        "spardl.Threshold": "spardl.compressors.threshold.Threshold",
        "spardl.TopK": "spardl.compressors.topk.TopK",
        "spardl.TopkDSA": "spardl.communicators.topkdsa.TopkDSA",
        "spardl.Warmup": "spardl.warmup.Warmup",
        "spardl.Wfbp": "spardl.schedules.wfbp.Wfbp",
        "spardl.Wire": "spardl.wire.Wire",
        "spardl.training.Constant": "spardl.training.lr.Constant",
        "spardl.training.Cosine": "spardl.training.lr.Cosine",
        "spardl.training.Exponential": "spardl.training.lr.Exponential",
        "spardl.training.LinearDecay": "spardl.training.lr.LinearDecay",
        "spardl.training.MultiStep": "spardl.training.lr.MultiStep",
        "spardl.training.NoLogger": "spardl.training.loggers.NoLogger",
        "spardl.training.ProcessGroup": "spardl.training.launch.ProcessGroup",
        "spardl.training.Simulated": "spardl.training.launch.Simulated",
        "spardl.training.Wandb": "spardl.training.loggers.Wandb",
    }
)
_NAMES: Mapping[str, str] = MappingProxyType({place: name for name, place in _PLACES.items()})


def first_edition(config: Any) -> Any:
    """A configuration whose targets are the places that ids are made from.

    Args:
        config: plain data.
    """
    return _renamed(config, lambda name: _PLACES.get(name, name))


def public(config: Any) -> Any:
    """A configuration whose targets have their public names, also where it was written for the first edition.

    Args:
        config: plain data.
    """
    return _renamed(config, lambda name: _NAMES.get(name, name))


def _renamed(value: Any, rename: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        return {key: rename(each) if _names(key, each) else _renamed(each, rename) for key, each in value.items()}
    if isinstance(value, list):
        return [_renamed(each, rename) for each in value]
    return value


def _names(key: Any, value: Any) -> bool:
    return key == _TARGET and isinstance(value, str)
