"""The training loop of real and simulated clusters, with its divergence checks and log windows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spardl.basics.errors import PeerError, StoppedError, TrainingError, warn
from spardl.basics.files import write_atomically
from spardl.clusters.base import Cluster, gather_rows
from spardl.clusters.profile import break_even_gbit, gather_costs
from spardl.method.refusals import NonFiniteCounts, NonFiniteReports
from spardl.protocol.programs import Phase
from spardl.schedules.measured import Groups
from spardl.vector.sparse import SparseVector, Sum
from trainer.checkpoint import (
    Restart,
    at_step,
    load_part,
    newest_valid,
    restoring,
    save_checkpoint,
    saved_workers,
)
from trainer.early_stopping import Stopper
from trainer.estimate import Estimate, estimate, tracking
from trainer.learner import Learner, Plan, Settings, digest, evaluate
from trainer.observers import Observer
from trainer.report import environment
from trainer.runs import Run
from trainer.tracing import Tracing

__all__ = ["DivergenceWatch", "Trainer", "Window", "all_finite"]


class DivergenceWatch:
    """Detects divergence; all workers reach the same conclusion and stop together.

    A checkpoint counts as *proven* only after a later step had a finite loss, or an evaluation of its weights was
    finite. Finite weights alone are not sufficient, because the loss that they give may not be finite.

    Args:
        cluster: Workers that train together.
        run: Run with the checkpoints.
        step: Number of steps that are done when training starts or resumes.
    """

    def __init__(self, cluster: Cluster, run: Run, step: int) -> None:
        self._cluster, self._run = cluster, run
        self._last = [True for _ in cluster.local_ranks]
        self._proven = step - 1

    def add(self, step: int, losses: Sequence[float]) -> None:
        """Records the losses of the local ranks in step ``step``, counted from 1."""
        self._last = [math.isfinite(loss) for loss in losses]
        # One finite loss suffices: all workers have the same weights.
        if any(self._last):
            self._proven = max(self._proven, step - 1)

    def look(self, step: int, parts: Sequence[Mapping[str, Sequence[Tensor]]]) -> bool:
        """Checks the state that a checkpoint would contain.

        Args:
            step: Number of steps done.
            parts: Tensors of each local rank, of any shape, by name; the names are the same on all ranks.

        Returns:
            Whether the caller must evaluate the weights to decide, because no worker's last loss was finite. The
            weights may still be good if the gradients of that step were discarded.

        Raises:
            TrainingError: On all workers, if a tensor of one of them is not finite.
        """
        rows = [
            torch.tensor([last, *map(all_finite, own.values())], dtype=torch.int64)
            for last, own in zip(self._last, parts, strict=True)
        ]
        table = torch.stack(gather_rows(self._cluster, rows))
        for name, fine in zip(parts[0], table[:, 1:].all(0).tolist(), strict=True):
            if not fine:
                raise self.diverged(f"the {name} no longer finite", step)
        return not bool(table[:, 0].any())

    def evaluated(self, step: int, loss: float) -> None:
        """Checks the loss of an evaluation of the weights after ``step`` steps.

        Raises:
            TrainingError: If the loss is not finite.
        """
        if not math.isfinite(loss):
            raise self.diverged(f"the evaluated loss is {loss}", step)
        self._proven = step

    def diverged(self, what: str, step: int) -> TrainingError:
        """Returns an error that names the newest proven checkpoint; all workers must call it together."""
        good = self._newest_good()
        way = f"continue with start_from={good}" if good else "start again: there is no earlier checkpoint"
        return TrainingError(f"{what} at step {step}; lower optimizer.lr or set training.clip_norm, and {way}")

    def _newest_good(self) -> Path | None:
        # Only rank 0 reads the checkpoints; gather_rows sends the result to the other ranks.
        rows = [torch.tensor([self._proven]) for _ in self._cluster.local_ranks]
        proven = int(torch.stack(gather_rows(self._cluster, rows)).max())
        folders = [self._run.checkpoints, *([self._run.checkpoint.parent] if self._run.checkpoint else [])]
        found = [newest_valid(folder, proven) if self._cluster.leads else None for folder in folders]
        rows = [torch.tensor([-1 if step is None else step for step in found]) for _ in self._cluster.local_ranks]
        steps = gather_rows(self._cluster, rows)[0].tolist()
        return next((at_step(folder, step) for folder, step in zip(folders, steps, strict=True) if step >= 0), None)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Returns whether all values of tensors of any shape are finite; normally waits for the GPU only once."""
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    if not floating:
        return True
    # A sum of finite values may overflow; only then is each value checked.
    sums = torch.stack([tensor.sum().double().to(floating[0].device) for tensor in floating])
    return bool(sums.isfinite().all()) or all(bool(tensor.isfinite().all()) for tensor in floating)


class Window:
    """Averages metrics between two log records; saved in checkpoints, so that a resumed run logs the same values."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._open()

    def _open(self) -> None:
        self._steps = 0
        self._losses = [[0.0, 0.0] for _ in self._cluster.local_ranks]
        self._seconds = [{p.value: ledger.seconds[p] for p in Phase} for ledger in self._cluster.ledgers]
        self._bytes = self._cluster.ledgers[0].bytes_sent

    def add(self, losses: Sequence[float]) -> None:
        """Adds the losses of a step; non-finite losses are ignored unless all losses of the window are non-finite."""
        self._steps += 1
        for sums, loss in zip(self._losses, losses, strict=True):
            if math.isfinite(loss):
                sums[0] += loss
                sums[1] += 1

    def close(self) -> dict[str, float]:
        """Returns the averages since the last call by name, and starts a new window; all workers must call it together.

        Loss and seconds are means over all workers and steps; bytes are per step of the first local rank.
        """
        rows = [torch.tensor(self._row(local), dtype=torch.float64) for local in range(len(self._losses))]
        table = torch.stack(gather_rows(self._cluster, rows))
        # As a separate tensor: in a wider table, torch may add in another order.
        loss, count = table[:, :2].contiguous().sum(0).tolist()
        seconds, steps = table[:, 2:].mean(0).tolist(), max(1, self._steps)
        values = {
            "loss": loss / count if count else math.nan,
            **{f"seconds/{phase.value}": value / steps for phase, value in zip(Phase, seconds, strict=True)},
            "bytes/sent": (self._cluster.ledgers[0].bytes_sent - self._bytes) / steps,
        }
        self._open()
        return values

    def _row(self, local: int) -> list[float]:
        before, ledger = self._seconds[local], self._cluster.ledgers[local]
        return [*self._losses[local], *(ledger.seconds[p] - before[p.value] for p in Phase)]

    def state_dict(self, local: int) -> dict[str, Any]:
        """Returns the values that a local rank has accumulated, as plain data."""
        return {
            "steps": self._steps,
            "losses": self._losses[local],
            "seconds": self._seconds[local],
            "bytes": self._bytes,
        }

    def load_state_dict(self, local: int, values: Mapping[str, Any]) -> None:
        """Restores the values of a local rank from the result of ``state_dict``."""
        self._losses[local], self._seconds[local] = values["losses"], values["seconds"]
        if local == 0:
            self._steps, self._bytes = values["steps"], values["bytes"]


@dataclass
class Progress:
    """Progress of a run and its results so far; saved in checkpoints.

    Attributes:
        step: Number of steps done.
        wall: Wall-clock seconds of training, including those before an interruption.
        virtual: Seconds on the cluster's clock (virtual if simulated), including those before an interruption.
        evaluating: Seconds of ``wall`` spent on evaluation.
        checks: Number of comparisons of all workers' averaged gradients and weights.
        timed_steps: Number of steps that count for samples per second.
        timed_seconds: Duration of these steps on the cluster's clock, in seconds.
        metrics: Metrics of the last evaluation.
        best: Best value of the task's main metric so far.
        shift: Number of steps done at earlier world sizes, minus the number of steps for the same examples now.
        counted_from: Number of steps done when the run started at its current world size; costs count from there.
        planned: Length of the learning-rate schedule in epochs, fixed at the start of the run.
    """

    step: int = 0
    wall: float = 0.0
    virtual: float = 0.0
    evaluating: float = 0.0
    checks: int = 0
    timed_steps: int = 0
    timed_seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    best: float | None = None
    shift: int = 0
    counted_from: int = 0
    planned: float | None = None

    def restart_counts(self, shift: int) -> None:
        """Restarts the counts of costs and speed at a new world size, where old counts are not valid."""
        self.shift, self.counted_from = shift, self.step
        self.timed_steps, self.timed_seconds = 0, 0.0


class Trainer:
    """The training loop: steps, logs, evaluations, checkpoints, and checks that all workers have equal weights.

    Args:
        plan: Plan of the training: task, method, optimizer and schedules.
        cluster: Workers that train together.
        run: Folder of the checkpoints, and the checkpoint to resume from.
        observers: Objects that receive the events of the run; empty except on rank 0.
        device: Device of the model.
        heartbeat: Function that is called in every process with the number of steps done; returns whether all processes
            stop now.
    """

    def __init__(
        self,
        plan: Plan,
        cluster: Cluster,
        run: Run,
        observers: Sequence[Observer] = (),
        device: torch.device | str = "cpu",
        heartbeat: Callable[[int], bool] = lambda step: False,
    ) -> None:
        self._plan, self._settings, self._cluster, self._run = plan, plan.settings, cluster, run
        self._observers, self._heartbeat = observers, heartbeat
        self._progress = Progress()
        self._restart: Restart | None = None
        self._refusals = NonFiniteReports(cluster.size)
        self._doing = "starting"
        self._groups_kept = False
        self._stopper = Stopper(plan.settings.early_stopping, plan.task)
        self._estimate: Estimate | None = None
        if run.checkpoint:
            self._begin_phase("loading the checkpoint")
            self._resume(plan, run.checkpoint, torch.device(device))
        else:
            self._begin_phase("building the model")
            self._begin(plan, torch.device(device))
        self._watch = DivergenceWatch(cluster, run, self._progress.step)
        self._first = self._progress.step
        # Clocks restart with the process; the offsets add the time before an interruption.
        self._clock_offset = self._progress.virtual - cluster.seconds()
        self._started = time.perf_counter() - self._progress.wall
        # The first steps after every start are slower, not only those of a new run.
        self._timed_from = self._progress.step + self._settings.untimed_steps
        traces = self._settings.profile and cluster.leads
        self._tracing = Tracing(cluster, run.folder, self._first, self._learner.total_steps) if traces else None

    def fit(self) -> dict[str, Any]:
        """Trains until the last step.

        Returns:
            The summary by name: final and best metric, seconds, bytes, number of checks and more.

        Raises:
            TrainingError: If the loss or the state is no longer finite, or the workers' weights differ.
            PeerError: If another worker is lost.
            StoppedError: If the heartbeat requested a stop; the state is saved.
        """
        try:
            return self._fit()
        except PeerError as error:
            raise PeerError(f"{error}; in step {self._progress.step + 1}, while {self._doing}") from error
        finally:
            if self._tracing:
                self._tracing.close()

    def _fit(self) -> dict[str, Any]:
        total = self._learner.total_steps
        self._estimate = estimate(self._plan, self._learner, self._cluster, total - self._progress.step)
        if self._estimate:
            self._notify("note", self._estimate.text)
        self._notify("begin", self._progress.step, total)
        if self._restart:
            figures = self._restart.figures(self._cluster, self._learner.synchronizer)
            self._notify("metrics", "restart", self._progress.step, figures)
            if self._progress.step >= total:  # at this world size, all data has been read
                self._learner.synchronizer.end()
            if self._evaluates_after(self._progress.step):  # the restart may fall on the end of an evaluation interval
                self._evaluate()
        self._heartbeat(self._progress.step)
        while self._progress.step < total and not self._stopper.stops:
            if self._tracing:
                self._tracing.before(self._progress.step)
            losses = self._timed_step()
            self._progress.step += 1
            self._window.add(losses)
            self._watch.add(self._progress.step, losses)
            self._after_step()
        return self._finish()

    def _timed_step(self) -> list[float]:
        self._doing = "training"
        first = self._estimate.first if self._estimate else "first step"
        self._notify("phase", first if self._progress.step == self._first else None)
        began = self._cluster.seconds()
        synchronizer = self._learner.synchronizer
        last = self._progress.step + 1 == self._learner.total_steps
        # Any evaluation may end a run early.
        synchronizer.measures_residual = last or (
            self._stopper.watches and self._evaluates_after(self._progress.step + 1)
        )
        passes = self._settings.accumulation * len(self._learner.workers)
        slow = self._estimate and self._observers and self._progress.step == self._first
        with tracking(self._learner.model, passes, partial(self._notify, "progress")) if slow else nullcontext():
            losses = self._learner.step(self._progress.step)
        if last:
            synchronizer.end()
        if self._progress.step >= self._timed_from:
            self._progress.timed_steps += 1
            self._progress.timed_seconds += self._cluster.seconds() - began
        return losses

    def _after_step(self) -> None:
        step, total, settings = self._progress.step, self._learner.total_steps, self._settings
        # After the last step, a request to stop changes nothing.
        leaves = self._heartbeat(step) and step < total
        self._notify("step", step)
        self._keep_groups()
        if step % settings.check_every == 0 or step == total:
            self._compare(self._digests(), "averaged gradients")
        if step % settings.log_every == 0 or step == total:
            self._log()
        evaluates = self._evaluates_after(step)
        saves = (
            step % settings.checkpoint_every == 0 if settings.checkpoint_every else self._learner.ends_interval(step, 1)
        )
        saves = saves or step == total or leaves
        # Before an evaluation, which would be meaningless, and before a checkpoint, which would be useless.
        if evaluates or saves:
            self._check_finite(step, evaluates=evaluates)
        if evaluates:
            self._evaluate()
        if self._stopper.stops and step < total:
            self._end_early()
        if saves or self._stopper.stops:
            self._save()
        if leaves and not self._stopper.stops:
            raise StoppedError(f"stopped at step {step} of {total} on request; all state is saved")

    def _end_early(self) -> None:
        self._learner.synchronizer.end()
        if self._plan.schedule.alone:  # the last exchange changed the weights
            self._evaluate()

    def _keep_groups(self) -> None:
        """Writes the chosen groups to a file, from which other runs can load them."""
        chosen = self._learner.synchronizer.chosen
        if chosen is None or self._groups_kept or not self._cluster.leads:
            return
        entries = [layer.entries for layer in self._learner.gradient.layers]
        write_atomically(self._run.folder / "groups.json", Groups(entries, chosen).text().encode())
        self._groups_kept = True

    def _evaluates_after(self, step: int) -> bool:
        return self._learner.ends_interval(step, self._settings.eval_every) or step >= self._learner.total_steps

    def _digests(self) -> list[Tensor]:
        """Returns hashes of the last averages, as computed by each local rank."""
        synchronizer = self._learner.synchronizer
        synchronizer.flush()
        averages = [synchronizer.averages(local) for local in range(len(self._learner.workers))]
        return [digest([tensor for average in own for tensor in _tensors(average)]) for own in averages]

    def _notify(self, event: str, *arguments: Any) -> None:
        for observer in self._observers:
            getattr(observer, event)(*arguments)

    def _begin_phase(self, doing: str) -> None:
        self._doing = doing
        self._notify("phase", doing)

    def _log(self) -> None:
        values = self._window.close()
        if not math.isfinite(values["loss"]):
            raise self._watch.diverged(f"the loss is {values['loss']}", self._progress.step)
        epoch = self._learner.epochs(self._progress.step)
        refused = self._refused()
        figures = {"epoch": epoch, **values, "lr": self._learner.rate, **({"refused": refused} if refused else {})}
        self._record("train", figures)

    def _record(self, kind: str, figures: Mapping[str, float]) -> None:
        seconds = time.perf_counter() - self._started
        totals = _totals(self._plan.settings, self._progress, self._learner, self._cluster, seconds)
        self._notify("metrics", kind, self._progress.step, {**figures, **totals})

    def _refused(self) -> int:
        """Counts the gradients of all workers that were discarded or clamped, and warns of new ones."""
        rows = [torch.tensor(own) for own in self._learner.synchronizer.gradient_state.refusals()]
        gathered = [NonFiniteCounts(*row.tolist()) for row in gather_rows(self._cluster, rows)]
        line = self._refusals.notice(dict(enumerate(gathered)))
        if line and self._cluster.leads:
            warn(line)
            self._notify("warning", line)
        return self._refusals.total

    def _check_finite(self, step: int, *, evaluates: bool) -> None:
        """Raises if the run has diverged, before its state is saved."""
        self._begin_phase("checking the weights")
        learner = self._learner
        learner.synchronizer.flush()
        doubtful = self._watch.look(step, [learner.local_tensors(local) for local in range(len(learner.workers))])
        if doubtful and not evaluates:
            few = replace(self._settings, eval_examples=self._settings.eval_batch_size)
            found = evaluate(self._plan.task, learner.model, self._cluster, learner.workers, few)
            self._watch.evaluated(step, found["loss"])

    def _evaluate(self) -> None:
        self._learner.synchronizer.flush()
        began = time.perf_counter()
        self._begin_phase("evaluating")
        settings, task = self._settings, self._plan.task
        self._progress.metrics = evaluate(
            task,
            self._learner.model,
            self._cluster,
            self._learner.workers,
            settings,
        )
        self._watch.evaluated(self._progress.step, self._progress.metrics["loss"])
        found, best = self._progress.metrics[task.metric], self._progress.best
        if best is None or (found > best if task.higher_is_better else found < best):
            self._progress.best = found
        self._stopper.add(self._progress.step, self._progress.metrics)
        # The residual can only be read after the flush above: a synchronization in flight changes it.
        self._record("eval", {**self._progress.metrics, **_residual_norm(self._learner)})
        self._progress.evaluating += time.perf_counter() - began

    def _compare(self, rows: Sequence[Tensor], what: str) -> None:
        self._begin_phase("comparing replicas")
        gathered = gather_rows(self._cluster, rows)
        # torch.equal compares bits here: the rows are integer hashes.
        odd = [rank for rank, row in enumerate(gathered) if not torch.equal(row, gathered[0])]
        if odd:
            raise TrainingError(
                f"the {what} of ranks {odd} differ from rank 0's at step {self._progress.step}: "
                "replicas must be bitwise identical; check the machines with spardl doctor"
            )
        self._progress.checks += 1

    def _save(self) -> None:
        self._begin_phase("saving a checkpoint")
        learner = self._learner
        learner.synchronizer.flush()
        self._read_clocks()
        save_checkpoint(
            self._run.checkpoints,
            self._progress.step,
            self._cluster,
            [partial(self._worker_state, local) for local in range(len(learner.workers))],
            lambda: {**learner.shared_state(), "progress": asdict(self._progress), **self._stopper.state_dict()},
            self._settings.keep_checkpoints,
            self._run.id,
        )

    def _worker_state(self, local: int) -> dict[str, Any]:
        return {**self._learner.worker_state(local), "window": self._window.state_dict(local)}

    def _read_clocks(self) -> None:
        self._progress.wall = time.perf_counter() - self._started
        self._progress.virtual = self._clock_offset + self._cluster.seconds()

    def _begin(self, plan: Plan, device: torch.device) -> None:
        self._learner = Learner(plan, self._cluster, device, self._progress.shift, self._progress.planned)
        self._progress.planned = self._learner.planned
        self._window = Window(self._cluster)

    def _resume(self, plan: Plan, checkpoint: Path, device: torch.device) -> None:
        shared, before = load_part(checkpoint, None, device), saved_workers(checkpoint)
        with restoring(checkpoint, None):
            self._progress = progress = Progress(**shared["progress"])
            self._stopper.load_state_dict(shared)
        if before != self._cluster.size:
            self._restart = Restart(before, checkpoint, device)
            # The data continues at the same example, at a step that depends on the world size.
            progress.restart_counts(self._restart.shift(plan, progress.step, progress.shift, self._cluster.size))
        if checkpoint.parent != self._run.checkpoints:  # start_from: max_steps and lr_schedule may have changed
            progress.planned = None
        self._begin(plan, device)
        with restoring(checkpoint, None):
            self._learner.load_shared_state(shared)
        for local, rank in enumerate(self._cluster.local_ranks):
            if self._restart:
                with restoring(checkpoint, rank % before):
                    self._learner.adopt_worker_state(local, self._restart.load, before)
            else:
                own = load_part(checkpoint, rank, device)
                with restoring(checkpoint, rank):
                    self._learner.load_worker_state(local, own)
                    self._window.load_state_dict(local, own["window"])

    def _finish(self) -> dict[str, Any]:
        self._learner.synchronizer.flush()
        weights = self._learner.digest()
        self._compare([weights] * len(self._learner.workers), "weights")
        self._read_clocks()
        summary = _summarize(self._plan, self._progress, self._learner, self._cluster, self._refused(), weights)
        if self._stopper.stops and self._progress.step < self._learner.total_steps:
            summary |= {"planned_steps": self._learner.total_steps, **self._stopper.outcome()}
        self._notify("end", summary)
        return summary


def _tensors(average: Sum) -> list[Tensor]:
    return [average.indices, average.values] if isinstance(average, SparseVector) else [average]


def _summarize(
    plan: Plan, progress: Progress, learner: Learner, cluster: Cluster, refused: int, weights: Tensor
) -> dict[str, Any]:
    costs = gather_costs(cluster, progress.step - progress.counted_from, learner.gradient.vector)
    waiting = learner.synchronizer.residual_size()
    return {
        "metric": plan.task.metric,
        "final": progress.metrics,
        "best": progress.best,
        "steps": progress.step,
        "epochs": learner.epochs(progress.step),
        "workers": cluster.size,
        "parameters": learner.gradient.vector.numel(),
        "wall_seconds": progress.wall,
        "cluster_seconds": progress.virtual,
        "evaluation_seconds": progress.evaluating,
        "step_seconds": costs.seconds,
        "step_seconds_beside": costs.overlapped,
        "step_rounds": costs.rounds,
        "step_words": costs.words,
        "step_bytes": costs.bytes_sent,
        "step_bytes_dense": costs.dense_bytes,
        "density": _density(progress, learner),
        "residual_ratio": waiting.norm if waiting else None,
        "residual_age": waiting.age if waiting else None,
        "replica_checks": progress.checks,
        "refused_gradients": refused,
        "samples_per_second": _samples_per_second(plan.settings, progress, cluster),
        "break_even_gbit": break_even_gbit(costs),
        "peak_memory_bytes": costs.peak_memory,
        "weights_sha256": weights.numpy(force=True).tobytes().hex(),
        "environment": environment(),
    }


def _totals(
    settings: Settings, progress: Progress, learner: Learner, cluster: Cluster, seconds: float
) -> dict[str, float]:
    """Returns totals of the run so far, which are logged with the metrics of a step or an evaluation."""
    pace = _samples_per_second(settings, progress, cluster)
    return {
        "density": _density(progress, learner),
        "time": time.time(),
        "seconds/total": seconds,
        "bytes/total": float(cluster.ledgers[0].bytes_sent),
        **({} if pace is None else {"samples/second": pace}),
    }


def _density(progress: Progress, learner: Learner) -> float:
    return learner.synchronizer.kept / progress.step / learner.gradient.vector.numel()


def _samples_per_second(settings: Settings, progress: Progress, cluster: Cluster) -> float | None:
    """Returns the training examples per second of all workers; ``None`` if no step was timed."""
    examples = settings.batch_size * settings.accumulation * cluster.size
    return progress.timed_steps * examples / progress.timed_seconds if progress.timed_seconds > 0 else None


def _residual_norm(learner: Learner) -> dict[str, float]:
    """Returns the 2-norm of the residual of the first local rank, if the method has one."""
    residual = learner.synchronizer.gradient_state.residuals()
    norm = math.hypot(*(float(torch.linalg.vector_norm(part)) for part in residual))
    return {"residual/norm": norm} if residual else {}
