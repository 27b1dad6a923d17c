"""Records a trace of a few training steps with ``torch.profiler``."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from spardl.basics.files import naming_errors
from spardl.clusters import Cluster

__all__ = ["TRACE", "Tracing"]

TRACE = "trace.json.gz"
# Steps before the trace, which compile and measure, and steps in the trace: few, since a step of a large model has
# tens of thousands of events.
_SKIPPED, _RECORDED = 6, 3


class Tracing:
    """Writes a trace of some steps of this process, for chrome://tracing or ui.perfetto.dev.

    The trace shows the library's phases, such as selection, as ranges named ``spardl.PHASE``. Only the thread of the
    training loop has such ranges: communication in other threads appears there as waiting.

    Args:
        cluster: Cluster whose phases are named.
        folder: Folder of the file ``trace.json.gz``.
        step: Number of steps that are done when training starts or resumes.
        total: Number of steps of the run.
    """

    def __init__(self, cluster: Cluster, folder: Path, step: int, total: int) -> None:
        self._cluster, self._file = cluster, folder / TRACE
        # The last steps of a run that is too short.
        self._first = max(step, min(step + _SKIPPED, total - _RECORDED))
        self._profiler: profile | None = None

    def before(self, step: int) -> None:
        """Starts or ends the recording if this is due before step ``step``, counted from 0."""
        if step == self._first:
            activities = [ProfilerActivity.CPU]
            if self._cluster.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profiler = profile(activities=activities)
            self._cluster.name_phases(on=True)
            self._profiler.start()
        elif step == self._first + _RECORDED:
            self.close()

    def close(self) -> None:
        """Ends the recording, if there is one, and writes the file."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        if self._cluster.device.type == "cuda":
            torch.cuda.synchronize(self._cluster.device)
        profiler.stop()
        self._cluster.name_phases(on=False)
        with naming_errors(self._file):
            # The suffix decides the format.
            partial = self._file.with_name(f".{TRACE}")
            profiler.export_chrome_trace(str(partial))
            partial.replace(self._file)
