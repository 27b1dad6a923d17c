"""Schedules: when gradients are sent. One schedule is one file."""

from spardl.schedules.after_backward import AfterBackward
from spardl.schedules.base import Schedule

__all__ = ["AfterBackward", "Schedule"]
