"""Schedules: when gradients are sent. One schedule is one file."""

from spardl.schedules.after_backward import AfterBackward
from spardl.schedules.base import Schedule
from spardl.schedules.dear import Dear
from spardl.schedules.layer_fusion import LayerFusion
from spardl.schedules.mg_wfbp import MgWfbp
from spardl.schedules.synchronizer import Synchronizer, Training
from spardl.schedules.wfbp import Wfbp

__all__ = ["AfterBackward", "Dear", "LayerFusion", "MgWfbp", "Schedule", "Synchronizer", "Training", "Wfbp"]
