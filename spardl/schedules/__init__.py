"""Schedules: when gradients are sent. One schedule is one file."""

from spardl.schedules.after_backward import AfterBackward
from spardl.schedules.base import Schedule
from spardl.schedules.dear import Dear
from spardl.schedules.engine import Engine
from spardl.schedules.layer_fusion import LayerFusion
from spardl.schedules.mg_wfbp import MgWfbp
from spardl.schedules.outer import OuterSteps
from spardl.schedules.training import Training
from spardl.schedules.wfbp import Wfbp

__all__ = ["AfterBackward", "Dear", "Engine", "LayerFusion", "MgWfbp", "OuterSteps", "Schedule", "Training", "Wfbp"]
