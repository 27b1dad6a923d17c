"""Schedules: when the gradients of a step are synchronized, and which layers are synchronized together."""

from spardl.schedules.dear import Dear
from spardl.schedules.engine import Engine, Schedule, Training
from spardl.schedules.measured import LayerFusion, MgWfbp
from spardl.schedules.outer import OuterSteps
from spardl.schedules.wfbp import AfterBackward, Wfbp

__all__ = ["AfterBackward", "Dear", "Engine", "LayerFusion", "MgWfbp", "OuterSteps", "Schedule", "Training", "Wfbp"]
