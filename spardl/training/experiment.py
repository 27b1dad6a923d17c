"""One run from its configuration to its summary: folder, workers, observers, result."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from spardl.clusters import Cluster
from spardl.compressors.base import SparseCompressor
from spardl.errors import ConfigError, SpardlError, StoppedError
from spardl.rehearsal import rehearse
from spardl.training.announcing import announced
from spardl.training.display import make_display
from spardl.training.launch import Heartbeat, Launcher
from spardl.training.learner import Plan
from spardl.training.loggers import Logger
from spardl.training.memory import available_bytes, what_does_not_fit
from spardl.training.observers import Beside, Guarded, MetricsFile, Observer, attempt
from spardl.training.report import print_report
from spardl.training.runs import Run, continue_from, new_run, run_id
from spardl.training.stopping import AskedToStopError
from spardl.training.trainer import Trainer

__all__ = ["Experiment", "decisive", "experiment_id"]

# What may differ between two runs of one experiment: it does not change their result.
_INCIDENTAL = {
    "": ("data_dir", "cache_dir", "output_dir", "resume", "force", "logger"),
    "dataset": ("root", "download", "cache"),
    "cluster": ("port", "timeout", "interface"),
    "training": ("log_every", "checkpoint_every", "keep_checkpoints", "check_every"),
}


def experiment_id(config: Mapping[str, Any], workers: int) -> str:
    """The hash of everything in a resolved configuration that can change the result.

    Args:
        config: plain data.
        workers: how many there will be, which the configuration may leave open. Of no influence on a run that is
            elastic.
    """
    return run_id({**decisive(config), "workers": None if _elastic(config) else workers})


def decisive(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a resolved configuration, plain data, that can change a run's result."""
    kept = {key: value for key, value in config.items() if key not in _INCIDENTAL[""]}
    for node in set(_INCIDENTAL) & set(kept):
        kept[node] = {key: value for key, value in kept[node].items() if key not in _INCIDENTAL[node]}
    if _elastic(config):
        kept["cluster"] = {key: value for key, value in kept["cluster"].items() if key != "workers"}
    return kept


def _elastic(config: Mapping[str, Any]) -> bool:
    return config.get("training", {}).get("elastic") is True


@dataclass(frozen=True)
class Experiment:
    """A configuration and the parts that were built from it.

    Attributes:
        config: resolved, as plain data.
        label: readable beginning of the run folder's name.
        plan: what to train and how.
        launcher: who starts the workers.
        logger: where figures go besides the run folder.
        caveats: what a reader of the results must know; kept in the summary.

    Raises:
        ConfigError: if the parts do not fit together.
    """

    config: Mapping[str, Any]
    label: str
    plan: Plan
    launcher: Launcher
    logger: Logger
    caveats: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.config["output_dir"]:
            raise ConfigError("output_dir must name a folder")
        resume = self.config["resume"]
        if resume is not None and not resume:
            raise ConfigError(f"resume must be auto, a run's folder, or null to begin anew, got {resume!r}")
        self.plan.check(self.launcher.workers)

    @property
    def id(self) -> str:
        """See :func:`experiment_id`."""
        return experiment_id(self.config, self.launcher.workers)

    @contextmanager
    def prepare(self) -> Iterator[Run]:
        """Finds the folder to write to, and the checkpoint to continue from; no other process gets them.

        Raises:
            ConfigError: if the workers cannot be started, the folder cannot be made, or nothing can be continued as
                asked.
        """
        self.launcher.check()
        root, resume = Path(str(self.config["output_dir"])), self.config["resume"]
        workers = None if self.plan.settings.elastic else self.launcher.workers
        with announced("looking for a checkpoint", quiet=not resume):
            found = continue_from(root, self.id, str(resume), workers) if resume else None
        run, lock = found or new_run(root, self.label, self.id)
        try:
            yield run
        finally:
            os.close(lock)

    def doubts(self) -> list[str]:
        """What may go wrong on this machine: a warning, if its memory will not do."""
        hosted = self.launcher.hosted()
        if hosted is None:
            return []
        warning = what_does_not_fit(self.plan.need(hosted.each), hosted.processes, available_bytes())
        return [warning] if warning else []

    def perform(self, run: Run) -> None:
        """Trains, and leaves the outcome in the run's summary.

        Raises:
            StoppedError: if it was asked to stop; the summary says so.
            SpardlError: if it failed; likewise.
        """
        self._write(run, "running")
        try:
            if isinstance(self.plan.method.compressor, SparseCompressor):
                with announced("compiling", quiet=not self.launcher.leads):
                    rehearse(self.plan.settings.formats.weights)
            self.launcher.launch(lambda *worker: self._work(run, *worker), run.folder)
        except StoppedError as error:
            self._write_outcome(run, "stopped", reason=str(error))
            raise
        except SpardlError as error:
            self._write_outcome(run, "failed", reason=str(error))
            raise
        except AskedToStopError:
            self._write_outcome(run, "stopped", reason="stopped, as asked, before training began")
            raise
        except KeyboardInterrupt:
            self._write_outcome(run, "interrupted")
            raise

    def _write(self, run: Run, status: str, **content: Any) -> None:
        if self.launcher.leads:
            run.write_summary({"id": run.id, "status": status, "caveats": self.caveats, **content})

    def _write_outcome(self, run: Run, status: str, **content: Any) -> None:
        if run.read_summary().get("status") == "finished":
            return  # what went wrong, went wrong after that
        with suppress(OSError):  # a full disk may be what went wrong, and must not hide it
            self._write(run, status, **content)

    def _work(self, run: Run, cluster: Cluster, device: torch.device, heartbeat: Heartbeat) -> None:
        observers = self._observers(run) if cluster.leads else []
        try:
            summary = Trainer(self.plan, cluster, run, observers, device, heartbeat).fit()
            self._write_end(run, cluster, summary)
        finally:
            for observer in observers:
                observer.close()
        if cluster.leads:
            report = partial(print_report, summary, run, len(cluster.local_ranks) > 1, self.caveats)
            attempt(report, "the report")

    def _write_end(self, run: Run, cluster: Cluster, summary: Mapping[str, Any]) -> None:
        if cluster.leads:
            run.write_summary({"id": run.id, "status": "finished", "caveats": self.caveats, **summary})

    def _observers(self, run: Run) -> list[Observer]:
        display = Guarded(make_display, "the display")
        # It may take long, and the other workers would wait for this one.
        logger = Beside(lambda: Guarded(lambda: self.logger.open(run, self.config), type(self.logger).__name__))
        return [MetricsFile(run.metrics_file), display, logger]
