"""An experiment: prepares the run folder, starts the workers and records the outcome."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from spardl.basics.errors import CheckpointError, ConfigError, SpardlError, StoppedError, StorageError
from spardl.basics.files import disk_full_message
from spardl.basics.version import __version__
from spardl.clusters import Cluster
from spardl.clusters.precompile import prepare
from spardl.clusters.workers.processes import StopRequestedError
from spardl.method.moving import double_momentum_warning, low_density_warning
from trainer.checkpoint import saved_by
from trainer.display import LogFile, make_display, show_activity
from trainer.launch import Heartbeat, Launcher
from trainer.learner import Plan, sample_optimizer
from trainer.memory import available_bytes, check_address_space, memory_warning
from trainer.observers import BackgroundObserver, Guarded, Logger, MetricsFile, Observer, attempt
from trainer.report import print_report
from trainer.runs import Run, check_branch, continue_from, finished_run, flat, new_run, run_id
from trainer.targets import editions, hashed_targets, resolve_recipe, resolve_scope
from trainer.trainer import Trainer

__all__ = ["Experiment", "experiment_id", "result_settings"]

# Nodes and settings that do not change the result, and so are no part of a run's id.
_INCIDENTAL = {
    "": ("data_dir", "cache_dir", "output_dir", "resume", "force", "logger", "presets", "plugins"),
    "dataset": ("root", "download", "cache"),
    "cluster": ("port", "timeout", "interface"),
    "training": ("log_every", "checkpoint_every", "keep_checkpoints", "check_every", "profile"),
}
# Settings that are part of the id only if set, so that runs keep the id of versions without these settings.
_OPTIONAL = {
    "": ("start_from",),
    "schedule": ("groups",),
    "residual": ("decay",),
    "training": ("early_stopping",),
}


def experiment_id(config: Mapping[str, Any], workers: int) -> str:
    """Returns the id of a run: a hash of the part of its configuration that can change the result.

    Args:
        config: Resolved configuration, as plain data.
        workers: Number of workers, because a configuration need not specify it. It is ignored for elastic runs
            (``training.elastic``), whose number of workers may change.
    """
    return run_id({**result_settings(config), "workers": None if _elastic(config) else workers})


def result_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a resolved configuration that can change the result of a run.

    Settings such as folders and log intervals are left out.
    """
    kept = _deciding("", resolve_scope(resolve_recipe(config)))
    for node in ({*_INCIDENTAL, *_OPTIONAL}) & set(kept):
        kept[node] = _deciding(node, kept[node])
    # The world size of an elastic run may change, and its id must not.
    if _elastic(config):
        kept["cluster"] = {key: value for key, value in kept["cluster"].items() if key != "workers"}
    return hashed_targets(kept)  # type: ignore[no-any-return]


def _deciding(node: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    left_out = {*_INCIDENTAL.get(node, ()), *(key for key in _OPTIONAL.get(node, ()) if _is_unset(settings.get(key)))}
    return {key: value for key, value in settings.items() if key not in left_out}


def _is_unset(value: Any) -> bool:
    return value is None or (isinstance(value, Mapping) and all(map(_is_unset, value.values())))


def _elastic(config: Mapping[str, Any]) -> bool:
    return config.get("training", {}).get("elastic") is True


@dataclass(frozen=True)
class Experiment:
    """A configuration and the parts built from it.

    Attributes:
        config: Resolved configuration, as plain data.
        label: Beginning of the run folder's name, such as ``topka-resnet20-cifar10``; the run's id follows.
        plan: Plan of the training: task, method, optimizer and schedules.
        launcher: Launcher that starts the workers.
        logger: Destination of metrics besides the run folder.
        caveats: Warnings for readers of the results, recorded in the summary.
        recall: Function that reads the resolved configuration of another run from its folder.

    Raises:
        ConfigError: If the parts cannot be combined.
    """

    config: Mapping[str, Any]
    label: str
    plan: Plan
    launcher: Launcher
    logger: Logger
    caveats: tuple[str, ...] = ()
    recall: Callable[[Path], Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        folder, resume = self.config["output_dir"], self.config["resume"]
        if not folder or isinstance(folder, (bool, list, dict)):
            raise ConfigError(f"output_dir must name a folder, got {folder!r}")
        if resume is not None and not resume:
            raise ConfigError(f"resume must be auto, a run's folder, or null to start a new run, got {resume!r}")
        start = self.config.get("start_from")
        if start is not None and (not start or isinstance(start, (bool, list, dict))):
            raise ConfigError(f"start_from must be a checkpoint, RUN/checkpoints/step-NUMBER, or null, got {start!r}")
        self.logger.check()
        self.plan.check(self.launcher.workers)

    @property
    def id(self) -> str:
        """Id of the run: a hash of the settings that can change its result."""
        return experiment_id(self.config, self.launcher.workers)

    @property
    def given(self) -> dict[str, str]:
        """Settings that must be equal in all processes, as text by dotted name; without paths, which may differ."""
        common = {**result_settings(self.config), "training": self.config["training"]}
        return {"version": __version__, **{name: str(value) for name, value in flat(common)}}

    @contextmanager
    def prepare(self) -> Iterator[Run]:
        """Chooses the run folder, locks it during the ``with`` block, and finds the checkpoint to resume from.

        Yields:
            The run: a new one, a run to resume, or a run that is already finished.

        Raises:
            ConfigError: If the workers cannot be started, or the folder cannot be created or is in use.
            CheckpointError: If the run cannot resume as requested, or cannot start from the checkpoint that
                ``start_from`` names.
        """
        self.launcher.check()
        # Workers on GPUs keep their state in GPU memory.
        if hosted := self.launcher.hosted():
            check_address_space(lambda: self.plan.need(hosted.each))
        root, resume = Path(str(self.config["output_dir"])), self.config["resume"]
        if done := self._finished(root):
            yield replace(done, finished=True)
            return
        # Elastic runs accept checkpoints of any world size.
        workers = None if self.plan.settings.elastic else self.launcher.workers
        with ExitStack() as stack:
            busy: list[Path] = []
            with show_activity("looking for a checkpoint", quiet=not resume):
                found = continue_from(root, self.id, str(resume), workers, busy) if resume else None
            if found:
                stack.callback(os.close, found.lock)
            # Once the run has saved a checkpoint, start_from has served its purpose.
            start = None if found and found.run.checkpoint else self._branch(workers)
            if not found:
                found = new_run(root, self.label, self.id)
                stack.callback(os.close, found.lock)
                stack.callback(_remove_unless_started, found.run)
            checkpoint = start or found.run.checkpoint
            with _disk_errors():
                yield replace(found.run, checkpoint=checkpoint, notices=(*_notices_of(busy), *found.run.notices))

    def _finished(self, root: Path) -> Run | None:
        """Returns the finished run of this configuration that ``resume=auto`` must not train again, if any."""
        if self.config["resume"] != "auto" or self.config.get("force"):
            return None
        done = finished_run(root, self.id)
        # A run of an earlier edition of the code has other results, and is trained again.
        return done if done and (done.read_summary().get("editions") or {}) == editions(self.config) else None

    def _branch(self, workers: int | None) -> Path | None:
        """Checks and returns the checkpoint of another run that ``start_from`` names, if any."""
        if not (given := self.config.get("start_from")) or not self.recall:
            return None
        checkpoint = Path(str(given))
        if not (checkpoint / "manifest.json").is_file():
            raise CheckpointError(f"start_from={given} is not a checkpoint; name one: RUN/checkpoints/step-NUMBER")
        folder = checkpoint.absolute().parents[1]
        before, owner, saver = self.recall(folder), Run("", folder).read_summary().get("id"), saved_by(checkpoint)
        # A checkpoint that was moved between folders would be compared with the wrong configuration.
        if None not in (owner, saver) and owner != saver:
            raise CheckpointError(
                f"start_from={given} was saved by run {saver}, but {folder} is run {owner}; move it back"
            )
        check_branch(checkpoint, result_settings(before), result_settings(self.config), workers)
        return checkpoint

    def warnings(self) -> list[str]:
        """Returns warnings about momentum that is applied twice, a density that is too low, or too little memory."""
        found = (
            []
            if self.plan.schedule.alone
            else [
                double_momentum_warning(self.plan.method, sample_optimizer(self.plan.optimizer)),
                low_density_warning(self.plan.method),
            ]
        )
        if hosted := self.launcher.hosted():
            found.append(memory_warning(self.plan.need(hosted.each), hosted.processes, available_bytes()))
        return list(filter(None, found))

    def perform(self, run: Run) -> None:
        """Trains the run, and records the outcome in its summary.

        Raises:
            StoppedError: If the run was stopped on request.
            SpardlError: If the run failed.
        """
        if self.launcher.leads:
            run.reserve()
        # Also tells later commands with resume=auto that this run is not finished.
        self._write(run, "running")
        try:
            with show_activity("compiling", quiet=not self.launcher.leads):
                self._compile()
            self.launcher.launch(lambda *worker: self._work(run, *worker), run.folder)
        except StoppedError as error:
            self._write_outcome(run, "stopped", reason=str(error))
            self._log_end(run, error)
            raise
        except SpardlError as error:
            self._write_outcome(run, "failed", reason=str(error))
            self._log_end(run, error)
            raise
        except StopRequestedError:
            self._write_outcome(run, "stopped", reason="stopped on request before training began")
            raise
        except KeyboardInterrupt:
            self._write_outcome(run, "interrupted")
            raise

    def _compile(self) -> None:
        # Once here, instead of in each worker.
        gradient = torch.empty(0, dtype=self.plan.settings.formats.weights)
        prepare(self.plan.method, self.launcher.workers, [gradient], logs=False)

    def _write(self, run: Run, status: str, **content: Any) -> None:
        if self.launcher.leads:
            run.write_summary({"id": run.id, "status": status, "caveats": self.caveats, **content})

    def _log_end(self, run: Run, error: SpardlError) -> None:
        if self.launcher.leads:
            run.log_end(_end(error))

    def _write_outcome(self, run: Run, status: str, **content: Any) -> None:
        if run.read_summary().get("status") == "finished":
            return  # the error occurred after training had finished
        with suppress(OSError):  # a full disk may be the error itself, which must not be masked
            if self.launcher.leads:
                run.release()
            self._write(run, status, **content)

    def _work(self, run: Run, cluster: Cluster, device: torch.device, heartbeat: Heartbeat) -> None:
        observers = self._observers(run, len(cluster.local_ranks) > 1) if cluster.leads else []
        try:
            summary = Trainer(self.plan, cluster, run, observers, device, heartbeat).fit()
            self._write_end(run, cluster, summary)
        except OSError as error:
            if text := disk_full_message(error):
                raise StorageError(f"{text}, then continue with the same command and resume=auto") from error
            raise
        except SpardlError as error:
            if cluster.leads:  # before the loggers are closed, which save the log
                run.log_end(_end(error))
            raise
        finally:
            for observer in observers:
                observer.close()
        # The result is saved: a closed output must not turn the run into a failure.
        if cluster.leads:
            report = partial(print_report, summary, run, len(cluster.local_ranks) > 1, self.caveats)
            attempt(report, "the report")

    def _write_end(self, run: Run, cluster: Cluster, summary: Mapping[str, Any]) -> None:
        if cluster.leads:
            run.release()
            about = {"caveats": self.caveats, "editions": editions(self.config)}
            run.write_summary({"id": run.id, "status": "finished", **about, **summary})

    def _observers(self, run: Run, simulated: bool) -> list[Observer]:
        display = Guarded(make_display, "the display")
        # In a thread, because the other workers would wait for a slow logger.
        logger = BackgroundObserver(
            lambda: Guarded(lambda: self.logger.open(run, self.config), type(self.logger).__name__)
        )
        return [MetricsFile(run.metrics_file), LogFile(run, simulated, self.caveats), display, logger]


def _end(error: SpardlError) -> str:
    return str(error) if isinstance(error, StoppedError) else f"error: {error}"


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Converts the error of a full disk, before the workers start, into a one-line error."""
    try:
        yield
    except OSError as error:
        if text := disk_full_message(error):
            raise ConfigError(f"{text}, or name another folder with output_dir=FOLDER") from error
        raise


def _remove_unless_started(run: Run) -> None:
    """Removes the folder of a run without a summary, the first file that a run writes."""
    if not run.summary_file.exists():
        shutil.rmtree(run.folder, ignore_errors=True)


def _notices_of(busy: Sequence[Path]) -> list[str]:
    if not busy:
        return []
    others = f" (and {len(busy) - 1} more)" if len(busy) > 1 else ""
    return [f"{busy[0]}{others} is in use by another process; this is a second run of the same configuration"]
