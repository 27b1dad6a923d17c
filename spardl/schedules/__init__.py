"""Schedules: when gradients are sent. One schedule is one file."""

from spardl.schedules.after_backward import AfterBackward
from spardl.schedules.base import Schedule
from spardl.schedules.dear import Dear
from spardl.schedules.engine import Engine, Training
from spardl.schedules.layer_fusion import LayerFusion
from spardl.schedules.mg_wfbp import MgWfbp
from spardl.schedules.wfbp import Wfbp

__all__ = ["AfterBackward", "Dear", "Engine", "LayerFusion", "MgWfbp", "Schedule", "Training", "Wfbp"]
