"""The engine averages the gradients of a model group by group; all schedules and handles build on it.

A *group* is a range of neighboring layers that are synchronized together. A *local rank* is one of the workers that
this process runs: one in a real cluster, all of them in a simulated one.

One training step consists of, for each local rank, ``begin``, the forward and backward passes (with
``before_backward`` before each backward pass) and ``collect``; then one ``finish``. Gradients are either views of a
flat vector that the optimizer reads (``FlatGradient``), or copies that the caller writes and reads
(``CopiedGradient``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from spardl.basics.errors import TrainingError
from spardl.basics.weakrefs import weak_method
from spardl.clusters.base import Cluster
from spardl.communicators.steps.nodes import Nodes
from spardl.method.method import Method
from spardl.method.provenance import compare, method_settings, shapes_of
from spardl.method.registry import check_averages_gradients
from spardl.protocol.programs import describe
from spardl.schedules.averaging import Averaging, ModelUpdate
from spardl.schedules.fusion import Range, is_partition, within
from spardl.schedules.gradient_state import GradientState, ResidualSize, Usage, step_counts
from spardl.schedules.scaling import Limit, Scale, Scaling
from spardl.schedules.step import Step
from spardl.schedules.tuning import Trials
from spardl.vector.flat import FlatGradient, Storage
from spardl.vector.sparse import Sum

__all__ = ["Engine", "Schedule", "Training", "check_saved"]


# Checks of saved states.


def check_saved(
    values: Mapping[str, Any],
    gradient: Storage,
    carried: GradientState,
    scaling: Scaling,
    trials: Trials | None,
    fixed: bool,
) -> None:
    """Checks that an engine can load ``values``, without changing anything.

    Args:
        values: State returned by the engine's ``state_dict``.
        gradient: Storage of the model's gradients.
        carried: Residuals and moments of the engine.
        scaling: Tracks the loss scale of a GradScaler, if there is one.
        trials: Measurement of different group sizes; ``None`` if the schedule does not measure any.
        fixed: Whether the groups never change during training.

    Raises:
        KeyError: If a value is missing.
        ValueError: If a value has another type or shape, or the groups differ.
        ConfigError: If the settings do not allow a value.
    """
    partition = values.get("partition", carried.partition)
    if not is_partition(partition, len(gradient.layers)):
        raise ValueError(
            f"'partition' must contain each of the {len(gradient.layers)} layers exactly once, in order, got "
            f"{describe(partition)}"
        )
    partition = [(start, stop) for start, stop in partition]
    if fixed and partition != carried.partition:
        raise ValueError(f"the groups of layers must be {carried.partition}, got {partition}")
    _check_groups(values["groups"], partition, gradient, carried)
    usage, kept, tried = values.get("usage", True), values.get("kept", 0), values.get("trials")
    if type(usage) is not bool:
        raise ValueError(f"'usage' must be True or False, got {describe(usage)}")
    if type(kept) is not int or kept < 0:
        raise ValueError(f"'kept' must be an integer, at least 0, got {describe(kept)}")
    scaling.check(values, [sum(gradient.entries[start:stop]) for start, stop in partition])
    if tried is not None and not isinstance(tried, Mapping):
        raise ValueError(f"'trials' must be a dict or None, got {describe(tried)}")
    if trials and tried is not None:
        trials.check_state(tried)


def _check_groups(
    groups: Sequence[Mapping[str, Any]], partition: Sequence[Range], gradient: Storage, carried: GradientState
) -> None:
    found = list(within(gradient.runs, partition))
    if len(found) != len(groups):
        raise ValueError(f"the saved state has {len(groups)} groups of layers, but this model has {len(found)}")
    for number, (layers, saved) in enumerate(zip(found, groups, strict=True)):
        try:
            carried.like(layers).check(saved, finite=carried.remembers)
        except (KeyError, ValueError) as error:
            raise ValueError(f"in group {number} of layers, {error.args[0]}") from error


# The training that a schedule runs.


class Training(NamedTuple):
    """The model, gradients and optimizer that a schedule trains, and options of the training.

    Attributes:
        model: Model whose passes overlap with communication.
        gradient: Storage of all gradients of the model.
        optimizer: Optimizer of the parameters; ``None`` if the caller uses the averages.
        clip_norm: Largest 2-norm of the averaged gradient, or of each worker's own gradient where the optimizer's
            momentum is applied before compression; ``None`` for no limit.
        scale: Function that returns the current loss scale, if a GradScaler changes it. All workers then agree in each
            step whether any gradient overflowed: for each group, each worker sends one byte to every other worker.
        find_unused: Whether workers exchange in every step which parameters have no gradient. Otherwise, they do so
            only until the first step in which every worker uses every parameter.
        decay: Function that returns, for a parameter, the multiple of its weights to add to its gradient; ``None`` uses
            the weight decay of the method's momentum rule.
        matrices: Parameters of shape (a, b) that Muon updates.
        weights: Weights that the averages change, equal on all workers: one tensor of each parameter's shape, in the
            order of ``gradient.parameters``. Empty for the parameters themselves.
        step_size: Function that returns, for a parameter, the learning rate with which the optimizer subtracts averaged
            updates from it; ``None`` if averages are subtracted as they are, or are not updates.
        nodes: Workers that share a node, whose gradients are averaged densely first.

    Example:
        >>> model = nn.Linear(100, 10)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> training = spardl.schedules.Training(model, spardl.vector.FlatGradient(model.named_parameters()), optimizer)
        >>> cluster = spardl.clusters.SimulatedCluster(2, spardl.clusters.Network(alpha=50e-6, gbit=1))
        >>> synchronizer = spardl.schedules.Wfbp(bucket_mb=1).start(spardl.make_method("spardl"), cluster, training)
        >>> for local in range(2):  # the workers simulated in this process
        ...     synchronizer.begin(local)
        ...     loss = model(torch.randn(5, 100)).square().mean()
        ...     synchronizer.before_backward(last=True)
        ...     loss.backward()
        ...     synchronizer.collect()
        >>> synchronizer.finish()
        >>> print(f"{synchronizer.kept} entries averaged, {cluster.ledgers[0].bytes_sent} bytes sent by each worker")
        10 entries averaged, 56 bytes sent by each worker
    """

    model: nn.Module | None
    gradient: Storage
    optimizer: torch.optim.Optimizer | None
    clip_norm: float | None = None
    scale: Scale | None = None
    find_unused: bool = False
    decay: Callable[[nn.Parameter], float] | None = None
    matrices: Collection[nn.Parameter] = ()
    weights: Sequence[Tensor] = ()
    step_size: Callable[[nn.Parameter], float] | None = None
    nodes: Nodes = Nodes()


# Measuring clones the residual, so only every 16th step is measured, which makes the cost negligible.
_MEASURE_EVERY = 16


class Engine(ABC):
    """Averages gradients group by group and runs the optimizer on the averages.

    Args:
        method: Method that averages the gradients.
        cluster: Cluster that runs the workers.
        training: Model, its gradients and the optimizer.
        partition: Ranges of layers that are synchronized together (groups); a group also ends where the dtype or device
            of the gradients changes.

    Attributes:
        kept: Number of entries in all averages so far; a sparse average counts only the entries that it contains.
        steps: Number of steps that have begun since the engine was created.
        gradient_state: Residuals and moments, which last from step to step.
        limit: Gradient clipping; ``limit.measured`` is the gradient norm of the last step.
        measures_residual: Whether to measure what each step adds to the residuals, for ``residual_size``. Engines of
            user loops (``attach`` and others) measure every 16th step in any case.
        chosen: Groups chosen by measurements; ``None`` before the choice, and in schedules that measure nothing.
        fixed: Whether the groups never change during training.
    """

    fixed: bool = True
    chosen: list[Range] | None = None
    _trials: Trials | None = None  # set by schedules that try other group sizes
    _clips_own: ClassVar[bool] = False  # whether clip_norm limits each worker's own gradient with any momentum

    def __init__(self, method: Method, cluster: Cluster, training: Training, partition: Sequence[Range]) -> None:
        self._method, self._cluster, self._training = method, cluster, training
        gradient = self._gradient = training.gradient
        ranks = len(cluster.local_ranks)
        self.kept = self.steps = 0
        self.measures_residual = False
        weights = training.weights or (gradient.parameters if method.compressor.needs_weights else ())
        self.gradient_state = GradientState(
            method, gradient, ranks, partition, training.matrices, weights, training.step_size
        )
        self.limit = Limit(training.clip_norm, first=method.momentum.moved or self._clips_own)
        self._scaling = Scaling(training.scale)
        self._usage = Usage(ranks, len(gradient.parameters), always=training.find_unused)
        self._step = Step(ranks, backwards=gradient.backwards)
        decay = training.decay or (lambda parameter: method.momentum.decay)
        self._averaging = Averaging(
            method, cluster, gradient, decay, self.gradient_state, self._scaling, self.limit, training.nodes
        )
        self._update = ModelUpdate(cluster, gradient, training.optimizer, self._usage, self._scaling, self.limit)
        self._use_groups()
        cluster.expect(gradient.entries)
        # The caller puts in copied gradients itself.
        self._hooks: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(weak_method(self._on_gradient, number))
            for number, parameter in enumerate(() if gradient.backwards else gradient.parameters)
        ]

    # --- agreement of the workers

    def compare(self, given: Mapping[str, Any] | None = None) -> None:
        """Checks that all workers have the same settings, before they send gradients.

        Args:
            given: Settings that determine the messages, by name; ``None`` uses engine, groups and ``clip_norm``.

        Raises:
            ConfigError: On all workers, if there is a difference.
        """
        # Workers simulated in one process share their settings.
        if len(self._cluster.local_ranks) == self._cluster.size:
            return
        facts, workers, device = self.facts(given), self._cluster.local_workers, self._cluster.device
        self._cluster.run_uncounted([compare(worker, facts, device) for worker in workers])

    def facts(self, given: Mapping[str, Any] | None = None) -> dict[str, str]:
        """Returns the settings and state that determine the messages, by name, as text.

        Args:
            given: Settings to include, by name; ``None`` uses engine, groups and ``clip_norm``.

        Returns:
            Settings of the method, the ``given`` settings, and the values that must be equal on all workers.
        """
        clip_norm, handle = self._training.clip_norm, type(self).__name__.strip("_")
        given = {"handle": handle, "groups": self.partition, "clip_norm": clip_norm} if given is None else given
        facts = {**method_settings(self._method), **{name: str(value) for name, value in given.items()}}
        facts["step"] = step_counts(self.gradient_state)
        facts |= shapes_of(*self._gradient.forward())
        facts |= {"groups of layers": str(self.partition), "usage exchanged": str(self._usage.state_dict())}
        return {**facts, "trials": str(self._trials and self._trials.progress)}

    # --- steps

    def begin(self, local: int = 0) -> None:
        """Announces the forward passes of the local rank ``local``; must be called first in each of its steps."""
        if local == 0:
            self.steps += 1
            due = self._gradient.backwards and self.steps % _MEASURE_EVERY == 1
            self._averaging.begin(measured=self.measures_residual or due)
            # A gradient that is averaged in place may already contain this step's values, which must not be rescaled.
            states = [] if self.gradient_state.shares else self.gradient_state.states
            self._scaling.settle(states, remembers=self.gradient_state.remembers)
        self._step.begin(local)

    def before_backward(self, *, last: bool) -> None:
        """Announces a backward pass; ``last`` states whether it is the local rank's last one in this step.

        Raises:
            TrainingError: If ``begin`` was not called in this step.
        """
        self._cluster.reach(self._step.local, (), backward=True)
        if last:
            self._step.begin_last_backward()

    def _on_gradient(self, number: int, parameter: nn.Parameter) -> None:
        # optimizer.zero_grad() or an assignment replaces .grad; the average would then miss this gradient.
        if isinstance(self._gradient, FlatGradient) and not self._gradient.has(number, parameter.grad):
            raise TrainingError(
                f"the gradient of {self._gradient.names[number]} is no longer a view of the flat gradient; call "
                "gradient.zero() instead of optimizer.zero_grad(), and do not assign .grad"
            )
        self.note(number)
        self.complete(number)

    def note(self, number: int) -> None:
        """Records that a backward pass produced a gradient for parameter ``number``."""
        self._usage.note(self._step.local, number)

    def complete(self, number: int) -> None:
        """Announces that a backward pass has completed the gradient of parameter ``number``."""

    def collect(self) -> None:
        """Ends the backward passes of the current local rank: hands over its gradient, and sets it to zero."""
        self._step.collect()

    @abstractmethod
    def finish(self) -> None:
        """Ends a step: the optimizer applies the averages (in DeAR just before the next use of the weights)."""

    def end(self) -> None:
        """Ends the training after the last step; outer steps exchange the remaining progress here."""

    def flush(self) -> None:
        """Waits for pending updates and applies them, so that the weights are those after the last step."""

    def close(self) -> None:
        """Removes all hooks from the model and the optimizer."""
        for hook in self._hooks:
            hook.remove()

    # --- results

    def averages(self, local: int = 0) -> list[Sum]:
        """Returns the averages of the last step as the local rank ``local`` computed them, one per group.

        Call this after ``flush`` and before the next gradient.
        """
        return [average for _, average in sorted(self._step.averages[local].items())]

    @property
    def scale(self) -> float:
        """Loss scale (a factor) of the gradients in residuals and moments."""
        return self._scaling.factor

    @property
    def overflowed(self) -> bool:
        """Whether the optimizer must skip this step because some worker's gradient, or a sum, overflowed."""
        return bool(self._scaling.overflowed)

    def residual_size(self) -> ResidualSize | None:
        """Returns the relative size of the first local rank's residual; ``None`` before the first measurement."""
        return self._averaging.residual_size()

    def local_tensors(self, local: int = 0) -> dict[str, Sequence[Tensor]]:
        """Returns the tensors, of any shape, that only the local rank ``local`` keeps between steps, by name."""
        return {"residuals are": self.gradient_state.local_tensors(local)}

    # --- groups

    @property
    def partition(self) -> list[Range]:
        """Ranges of layers that are synchronized together."""
        return self.gradient_state.partition

    def _regroup(self, partition: Sequence[Range]) -> None:
        # Unused averages are stored by group, so they must return to the residuals before the groups change.
        self._scaling.return_unused(self.gradient_state.states, remembers=self.gradient_state.remembers)
        self.gradient_state.regroup(partition)
        self._use_groups()

    def _use_groups(self) -> None:
        self._averaging.regroup()
        self._step.regroup(self.gradient_state.groups)

    # --- saved states

    def state_dict(self, local: int = 0) -> dict[str, Any]:
        """Returns the state of the local rank ``local`` as plain data; its tensors share memory with the engine."""
        self.flush()
        return {
            "partition": [list(layers) for layers in self.partition],
            "groups": self.gradient_state.state_dicts(local),
            "usage": self._usage.state_dict(),
            "kept": self.kept,
            **self._scaling.state_dict(),
        }

    def load_state_dict(self, local: int, values: Mapping[str, Any]) -> None:
        """Loads ``values`` that ``state_dict`` returned for the same rank, into the local rank ``local``.

        Only ``groups`` is required; other missing values stay as they are.
        """
        self._load_common(values)
        self.gradient_state.load_state_dicts(local, values["groups"])

    def adopt(self, local: int, parts: Sequence[Mapping[str, Any]], before: int) -> None:
        """Loads states that a run with another number of workers saved.

        Args:
            local: Local rank that loads the states.
            parts: States that the old ranks ``spardl.method.elastic.sources(...)`` saved, in that order.
            before: Number of workers that saved the states.
        """
        self._load_common(parts[0])
        self._scaling.rescale_unused(before / self._cluster.size)
        worker = self._cluster.local_workers[local]
        self.gradient_state.adopt(local, worker, [part["groups"] for part in parts], before)

    def _load_common(self, values: Mapping[str, Any]) -> None:
        """Loads the values that are equal on all workers."""
        partition = [(start, stop) for start, stop in values.get("partition", self.partition)]
        if partition != self.partition:
            self._regroup(partition)
        self._usage.load_state_dict(values.get("usage", self._usage.state_dict()))
        self.kept = values.get("kept", self.kept)
        self._scaling.load_state_dict(values)


# The schedule, as a configuration chooses it.


class Schedule(ABC):
    """A rule for when gradients are sent in a training step, for example during the backward pass.

    A schedule is immutable; the state of a training run is in its ``Engine``.

    Attributes:
        name: Name of the schedule in configurations.
        alone: Whether each worker's optimizer steps independently, so that optimizer states differ between workers.
    """

    name: ClassVar[str]
    alone: ClassVar[bool] = False

    def check(self, method: Method, *, clips: bool) -> None:
        """Checks that the schedule can run a method, before any worker starts.

        Args:
            method: Method that averages the gradients.
            clips: Whether gradient clipping limits the norm of the average.

        Raises:
            ConfigError: If this schedule cannot run the method; the message says what to do instead.
        """
        check_averages_gradients(method.compressor, method.momentum, f"schedule={self.name}")

    def start(self, method: Method, cluster: Cluster, training: Training) -> Engine:
        """Creates the engine of one training; all workers must call this at the same time.

        Args:
            method: Method that averages the gradients.
            cluster: Cluster that runs the workers.
            training: Model, its gradients and the optimizer.

        Returns:
            The engine, whose methods the training loop calls.

        Raises:
            ConfigError: On all workers, if their settings differ.
        """
        engine = self.make(method, cluster, training)
        engine.compare()
        return engine

    @abstractmethod
    def make(self, method: Method, cluster: Cluster, training: Training) -> Engine:
        """Creates the engine as ``start`` does, without comparing the settings of the workers.

        Args:
            method: Method that averages the gradients.
            cluster: Cluster that runs the workers.
            training: Model, its gradients and the optimizer.

        Returns:
            The engine.
        """
