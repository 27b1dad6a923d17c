"""DDP communication hook: :func:`attach` and the state that the hook keeps between steps."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from spardl.basics.checks import check_type
from spardl.basics.errors import ConfigError
from spardl.basics.weakrefs import on_finalize, weak_method
from spardl.hooks.averager import REQUIRED_KEYS, WRONG_PARAMETERS, Averager, Named, SideGroup, inherit
from spardl.hooks.buckets import (
    BucketWatcher,
    Grouping,
    check_averaged,
    check_joined,
    check_modules,
    check_wrapped,
    dense_mean,
    fills_buffer,
    join_config,
    pending_future,
    saved_grouping,
    unchanged_bucket,
    views_of,
)
from spardl.hooks.choosing import choose_method, choose_schedule, default_method
from spardl.hooks.delayed import DelayedUpdate
from spardl.hooks.handle import GradientHandle
from spardl.hooks.optimizer_steps import after_backward
from spardl.method.method import Method
from spardl.method.moving import Optimizers
from spardl.method.names import MethodName
from spardl.method.provenance import check_owner, check_whole
from spardl.schedules import Dear, Schedule, Wfbp

__all__ = ["Hook", "attach", "hook"]


# torch inspects the annotations of hooks and rejects strings: no `from __future__ import annotations` in this module.


_SavedState = Mapping[str, Any] | None


class _PendingBucket(NamedTuple):
    """A DDP bucket whose gradients are being averaged.

    Attributes:
        views: Gradients as views of the buffer, by parameter.
        buffer: Buffer from which DDP reads the averages.
        ready: Future that DDP waits for.
    """

    views: Mapping[Tensor, Tensor]
    buffer: Tensor
    ready: torch.futures.Future[Tensor]


class _Groups:
    """Makes the averagers of a hook; their groups follow DDP's buckets if gradients are averaged there in place.

    Args:
        make: Function that makes an averager for a grouping.
        schedule: Schedule that forms the groups if they do not follow DDP's buckets.
        watcher: Observes DDP's buckets; ``None`` if groups do not follow them.
    """

    def __init__(self, make: Callable[[Grouping], Averager], schedule: Schedule, watcher: BucketWatcher | None) -> None:
        self._make, self._schedule, self._watcher = make, schedule, watcher
        # Whether the groups are those of the buckets that DDP formed after the very first step.
        self._final = False

    def averager_of(self, named: list[Named], after: Averager | None = None, values: _SavedState = None) -> Averager:
        """Makes an averager, with the order and groups of a saved state if groups follow DDP's buckets.

        Args:
            named: Parameters to average.
            after: Averager whose training it continues; its method must have no residual.
            values: Saved state to load.
        """
        saved = saved_grouping(named, values) if self._watcher and values else None
        # A state in the order of the model was saved before its first step, when DDP had not formed its buckets.
        final = saved is not None and saved.named != named
        averager = self._make(saved if saved and final else Grouping(named, self._schedule))
        if after is not None:
            averager.continue_from(after)
        if values is not None:
            averager.load_state_dict(values)
        self._final = final
        return averager

    def after_step(self, averager: Averager, cluster: SideGroup) -> Averager:
        """Returns the averager for the next step: after the first one, its groups become DDP's buckets."""
        if self._watcher is None or self._final:
            return averager
        following = self._make(self._watcher.observed(cluster, averager.gradient.parameters))
        following.continue_from(averager)
        self._final = True
        return following

    def load(self, averager: Averager, named: list[Named], values: Mapping[str, Any]) -> Averager:
        """Loads the state ``values`` of the parameters ``named``; returns the averager to use from now on."""
        same = self._watcher is None and averager.numbers.keys() == {pair.parameter for pair in named}
        if named and not same:
            return self.averager_of(named, averager, values)
        averager.load_state_dict(values)
        return averager

    def put(self, averager: Averager, bucket: _PendingBucket) -> None:
        """Passes the gradients of a bucket to the averager; in place if groups follow DDP's buckets."""
        if self._watcher is not None:
            numbers = [averager.numbers[parameter] for parameter in bucket.views]
            averager.lend(numbers, bucket.buffer if fills_buffer(bucket.views.values(), bucket.buffer) else None)
        for parameter, view in bucket.views.items():
            averager.put(averager.numbers[parameter], view)

    def close(self) -> None:
        """Stops observing DDP's buckets."""
        if self._watcher is not None:
            self._watcher.close()


class Hook(GradientHandle):
    """State of the communication hook of a DDP model: ``ddp.register_comm_hook(state, spardl.hook)``.

    Most programs call :func:`attach` instead.

    Args:
        ddp: Model whose gradients are averaged.
        method: Method that averages them.
        bucket_mb: Largest size of a group in megabytes (2^20 bytes), if the schedule has such a limit; ``None`` means
            25, or DDP's own buckets if sums are dense. Parameters are never split.
        timeout: Time in seconds after which a worker that does not answer counts as lost.
        scaler: GradScaler that scales the loss, if any.
        schedule: Schedule that determines when gradients are sent, as for :func:`attach`.
        optimizer: Optimizer of the model, as for :func:`attach`.
        clip_norm: Largest 2-norm of a gradient, as for :func:`attach`.
        ranks_per_node: Number of workers that share a node, as for :func:`attach`.

    Raises:
        ConfigError: If the model is not a DDP that passes all its buckets to hooks, has sparse gradients, or an
            argument is invalid or contradicts another one.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        method: Method,
        bucket_mb: float | None = None,
        timeout: float = 1800.0,
        scaler: GradScaler | None = None,
        schedule: str | Schedule = "wfbp",
        optimizer: Optimizers = None,
        clip_norm: float | None = None,
        ranks_per_node: int | str = 1,
    ) -> None:
        check_wrapped(ddp)
        check_type("method", method, Method)
        chosen = choose_schedule(schedule, bucket_mb)
        check_modules(ddp.module, chosen)
        self._named = [Named(*pair) for pair in ddp.module.named_parameters()]
        averaged = [pair for pair in self._named if pair.name not in getattr(ddp, "parameters_to_ignore", ())]
        self._frozen = [pair for pair in averaged if not pair.parameter.requires_grad]
        trained = [pair for pair in averaged if pair.parameter.requires_grad]
        self._device = self._named[0].parameter.device
        super().__init__(
            method,
            chosen,
            self._named,
            trained,
            device=self._device,
            group=ddp.process_group,
            timeout=timeout,
            scaler=scaler,
            optimizer=optimizer,
            clip_norm=clip_norm,
            ranks_per_node=ranks_per_node,
        )
        # Unless the user asks for other groups, gradients that the method sums in place stay in DDP's buckets.
        in_buckets = schedule == Wfbp.name and bucket_mb is None and self.method.in_place
        watcher = BucketWatcher(ddp, self._named) if in_buckets else None
        self._groups = _Groups(weak_method(self._make), chosen, watcher)
        # Whether it is known which parameters DDP synchronizes, whether the averager has state that a newer hook must
        # inherit, and whether the running backward pass is ignored.
        self._parameters_known = self._has_state = self._ignores_pass = False
        self._attached, self._buckets = True, list[_PendingBucket]()
        # torch cannot unregister a hook. The first one of a model forwards to the latest.
        self._latest: Hook | None = None
        self._predecessor: Hook | None = None
        self._delayed: DelayedUpdate | None = None
        awaited = () if ddp.find_unused_parameters else self._trained
        if isinstance(chosen, Dear):
            (own,) = self._optimizers
            # DeAR observes the first forward pass, so it cannot wait until DDP has shown its buckets.
            more = {"model": ddp.module, "optimizer": own, "find_unused": ddp.find_unused_parameters}
            self._averager = self._make(Grouping(trained, chosen), **more)
            self._delayed = DelayedUpdate(self._averager, ddp.module, own, clip_norm, awaited)
            self._parameters_known = True
        else:
            # Made now, so that state_dict() is complete, and load_state_dict() checks, before the first step.
            self._averager = self._groups.averager_of(trained)
        # Weak: torch keeps this object where Python's garbage collector cannot find a cycle with the DDP model.
        self._ddp, self._join_config = weakref.ref(ddp), join_config(ddp)
        # After DelayedUpdate, whose pre-step hook hides gradients from later ones.
        self._watch_steps(delayed=self._delayed is not None, awaited=awaited)
        self._finalizer = on_finalize(self, self._optimizer_steps.handle_dropped)
        mark = self._delayed.mark if self._delayed else self._optimizer_steps.mark
        self._untraced, self._mark_after_backward = weak_method(self._average), after_backward(weak_method(mark))

    def _make(self, grouping: Grouping, **training: Any) -> Averager:
        given = {"handle": "attach", "clip_norm": self._clip_norm}
        return self._make_averager(grouping.named, given, grouping.schedule, **training)

    def _active_averager(self) -> Averager | None:
        return self._averager if self._parameters_known else None

    def average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Averages a bucket's gradients over all workers, overlapped with the backward pass.

        Args:
            bucket: Bucket from DDP.

        Returns:
            A future with the bucket's buffer, shape (n,), which then holds the averages. All futures of a step complete
            after its last bucket.

        Raises:
            ConfigError: In the first step, on all workers, if their settings differ.
            PeerError: If another worker is lost or does not answer in time.
        """
        return cast("torch.futures.Future[Tensor]", self._untraced(bucket))

    def _average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if self._latest is not None:
            return self._latest.average(bucket)
        if not self._attached:
            return dense_mean(bucket, self._cluster.group)
        if bucket.index() == 0:
            self._begin(bucket.parameters())
        if self._ignores_pass:
            if bucket.is_last():
                self._optimizer_steps.check_ignored()
            return unchanged_bucket(bucket, self._device)
        ready = pending_future(self._device)
        self._buckets.append(_PendingBucket(views_of(bucket), bucket.buffer(), ready))
        if (averager := self._active_averager()) is not None:
            self._groups.put(averager, self._buckets[-1])
        if bucket.is_last():
            self._end(averager or self._learn_parameters())
        # The callback makes the future raise an error: DDP takes one that is returned as a value for a tensor.
        return ready.then(lambda done: done.wait())

    def _begin(self, first: Iterable[Tensor]) -> None:
        if self._delayed is not None or self.method.momentum.moved:
            check_joined(self._ddp(), self._join_config)
        check_averaged(self._frozen)
        self._buckets = []
        if (averager := self._active_averager()) is not None:
            # The last backward pass may have been interrupted after some buckets were sent.
            averager.give_up()
            self._inherit_state(averager)
        self._ignores_pass = self._ignores(first)
        if averager is not None and not self._ignores_pass:
            self._begin_step(averager)

    def _end(self, averager: Averager) -> None:
        """Completes a step after its last bucket: writes the averages to DDP's buffers."""
        if self._delayed is not None:
            usable = self._delayed.collect()
        else:
            # DDP would wait as well, but would replace the error by its own long one.
            averager.wait()
            usable = not averager.engine.overflowed
        if usable:
            self._optimizer_steps.averaged(self._discards)
        self._mark_after_backward()
        self._meter.step()
        for views, buffer, ready in self._buckets:
            if self._delayed is None:
                for parameter, view in views.items():
                    averager.gradient.take(averager.numbers[parameter], view)
            elif not usable:
                buffer.fill_(torch.inf)  # makes the GradScaler skip the step
            ready.set_result(buffer)
        self._buckets = []
        self._averager = self._groups.after_step(averager, self._cluster)

    def _learn_parameters(self) -> Averager:
        """Makes the averager in the first step, when all buckets and thus DDP's parameters are known."""
        shown = {parameter for bucket in self._buckets for parameter in bucket.views}
        check_averaged(each for each in self._trained if each.parameter not in shown)
        averager = self._averager
        # Parameters that were frozen after the model was wrapped are still in DDP's buckets.
        if averager is None or averager.numbers.keys() != shown:
            if self._has_state:
                raise ConfigError(WRONG_PARAMETERS)
            averager = self._groups.averager_of([pair for pair in self._named if pair.parameter in shown])
            self._averager = averager
        self._parameters_known = True
        self._inherit_state(averager)
        self._optimizer_steps.take_over(averager)
        self._exclude_discarded(averager)
        for bucket in self._buckets:
            self._groups.put(averager, bucket)
        return averager

    def _inherit_state(self, averager: Averager) -> None:
        if before := (self._predecessor._release_state() if self._predecessor else None):
            inherit(averager, before)
        self._predecessor, self._has_state = None, True

    def _release_state(self) -> Averager | None:
        """Returns the averager with residuals and moments, if there is one; this hook has none afterwards."""
        averager, self._averager = self._averager, None
        # A hook without a step passes on the state that it would have taken from its predecessor.
        return averager if self._has_state else (self._predecessor._release_state() if self._predecessor else None)

    def follow(self, last: "Hook") -> None:
        """Replaces this hook by a newer one of the same model, which takes over residuals and moments.

        Args:
            last: Newer hook of the same model.

        Raises:
            ConfigError: If this hook, or the one that replaced it, is not detached.
        """
        before = self._latest or self
        _check_detached(before)
        last._predecessor, self._latest = before, last

    # --- state and statistics

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of this worker as plain data; each rank saves its own.

        For ``torch.distributed.checkpoint``, save ``sharded()`` instead.
        """
        if self._averager is None:
            return {}  # a newer handle of the model has the state
        if self._predecessor is not None:
            self._inherit_state(self._averager)
        return self._averager.state_dict()

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Restores the state that ``state_dict`` returned on the same rank and world size.

        All workers must load states of the same step; otherwise they fail at most 16 steps later.

        Args:
            values: Saved state, on any device. An empty mapping resets the handle to its state before the first step.

        Raises:
            ConfigError: If the state belongs to another rank, world size, method, model or ``bucket_mb``, or is
                incomplete; nothing is changed then.
        """
        averager = self._averager
        if averager is None:
            raise ConfigError("a newer handle of this model has replaced this one; load the state into the newer one")
        fresh = isinstance(values, Mapping) and not values
        if not fresh:
            check_owner(values, self._owner, "groups")
            check_whole(values, REQUIRED_KEYS)
        if self._delayed is not None:
            # Settling changes weights, so the state must be known to be valid.
            if not fresh:
                averager.check_state(values)
            self._delayed.settle()
        if fresh:
            averager.forget()
        else:
            # Before the first step, parameters that DDP ignores may differ between the state and now.
            names = averager.gradient.names if self._parameters_known else values["names"]
            self._averager = self._groups.load(averager, [pair for pair in self._named if pair.name in names], values)
        self._optimizer_steps.forget()
        self._predecessor, self._has_state = None, not fresh  # a loaded state replaces the predecessor's

    def flush(self) -> None:
        """Applies updates that are still pending, so that weights can be read; needed with ``schedule="dear"`` only."""
        if self._delayed is not None:
            self._delayed.flush()

    @property
    def _nbytes(self) -> float:
        return sum(parameter.nbytes for _, parameter in self._named if parameter.requires_grad)

    @property
    def steps(self) -> int:
        """Number of synchronizations since the handle was created."""
        return self._meter.steps

    @property
    def gradient_norm(self) -> float | None:
        """2-norm of this worker's last gradient before clipping; ``None`` unless ``clip_norm`` is set."""
        return self._averager.engine.limit.measured if self._averager else None

    def detach(self) -> None:
        """Averages densely from now on, like DDP without a hook.

        The next ``attach`` takes over residuals, and moments if its optimizers are of the same kinds and Muon has the
        same matrices. Without another ``attach``, moments are lost: the optimizer continues with an empty state.

        Raises:
            PeerError: If ``schedule="dear"`` waits for a worker that is lost. The handle is detached nevertheless.
        """
        delayed, self._delayed = self._delayed, None
        try:
            if delayed is not None:
                delayed.close()
        finally:
            self._groups.close()
            self._attached, self._buckets = False, []
            self._release()

    def __deepcopy__(self, memo: object) -> None:
        """Returns ``None``, because torch registers no hook for copies of a model."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles ``None`` instead of the hook: an unpickled model has no hook."""
        return type(None), ()


def hook(state: Hook, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Averages a bucket; pass this function to ``DistributedDataParallel.register_comm_hook(state, hook)``.

    Args:
        state: State of the model's hook, a :class:`Hook`.
        bucket: Bucket from DDP.

    Returns:
        A future with the bucket's buffer, shape (n,), which then holds the averages.
    """
    return state.average(bucket)


def attach(
    ddp: DistributedDataParallel,
    method: MethodName | str | Method | None = None,
    *,
    bucket_mb: float | None = None,
    timeout: float = 1800.0,
    scaler: GradScaler | None = None,
    schedule: str | Schedule = "wfbp",
    optimizer: Optimizers = None,
    clip_norm: float | None = None,
    ranks_per_node: int | str = 1,
    **options: Any,
) -> Hook:
    """Makes DDP average its gradients with a method of this library.

    All workers must call it with the same arguments. The training loop stays as it is. To change the method, call
    ``detach`` on the handle and ``attach`` again.

    Args:
        ddp: Model whose gradients are averaged.
        method: Name of a method (see ``spardl.method_names()``), or a :class:`Method`; ``None`` means
            ``"spardl"``, or ``"onebit"`` if ``optimizer`` contains Muon.
        bucket_mb: Largest size of a group of gradients in megabytes (2^20 bytes); ``None`` means 25, or DDP's own
            buckets if sums are dense.
        timeout: Seconds after which a worker that does not answer counts as lost.
        scaler: ``GradScaler`` that scales the loss, if any. Residuals follow its scale, and all workers skip a step in
            which a gradient of any worker overflows.
        schedule: When groups of gradients are sent: ``"wfbp"`` (groups of ``bucket_mb``), ``"mg_wfbp"`` or
            ``"layer_fusion"`` (groups chosen by measuring the first steps), ``"dear"`` (also overlaps with the next
            forward pass), or an object: ``Wfbp(50)``.
        optimizer: Optimizer of the model (SGD, Adam, AdamW or Muon), or several of different parameters:
            ``[muon, adamw]``. Most sparse methods then average updates instead of gradients: each worker keeps its own
            moments, and ``step()`` only applies averages. With ``"dear"``, the next forward pass applies them; call
            ``handle.flush()`` before you read weights directly.
        clip_norm: Largest 2-norm of each worker's own gradient if updates are averaged, or of the average with
            ``"dear"``.
        ranks_per_node: Number of workers that share a node, with consecutive ranks, or ``"auto"`` to read it from the
            variables of torchrun or srun. Gradients are first averaged densely inside each node; the method runs
            between nodes, and the workers of a node share its messages. Needs ``schedule="wfbp"``.
        **options: Options of the method, for example ``density=0.01``, ``teams=2``; see :class:`Recipe`.

    Returns:
        The handle, with ``state_dict``, ``load_state_dict``, ``stats``, ``reset``, ``discard``, ``detach``.

    Raises:
        ConfigError: If the method or an option is unknown or does not support the number of workers, if ``ddp`` is not
            a DDP, has a hook, or has sparse or complex gradients; in the first step, if arguments differ.

    Example:
        >>> ddp_model = nn.parallel.DistributedDataParallel(nn.Linear(100, 10))
        >>> handle = spardl.attach(ddp_model, "spardl", density=0.01)
        >>> ddp_model(torch.randn(5, 100)).sum().backward()
        >>> gradient = torch.cat([parameter.grad.flatten() for parameter in ddp_model.parameters()])
        >>> print(f"{gradient.count_nonzero()} of {len(gradient)} entries are averages; the rest is in the residual")
        10 of 1010 entries are averages; the rest is in the residual
    """
    if registered := _registered(ddp):
        _check_detached(registered)
    method = default_method(options, optimizer) if method is None else method
    chosen = choose_method(method, options, schedule, optimizer, ranks_per_node)
    handle = Hook(ddp, chosen, bucket_mb, timeout, scaler, schedule, optimizer, clip_norm, ranks_per_node)
    if registered:
        _check_same_nodes(registered, handle)
        registered.follow(handle)
    else:
        _register(ddp, handle)
    return handle


def _check_detached(before: Hook) -> None:
    if (before._latest or before)._attached:
        raise ConfigError("this model already has a handle; call its detach() before attach()")


def _check_same_nodes(before: Hook, last: Hook) -> None:
    earlier, now = before._nodes.ranks_per_node, last._nodes.ranks_per_node
    if earlier != now:
        last.detach()
        raise ConfigError(
            f"the last handle of this model had ranks_per_node={earlier}, and this one has {now}; use the same value, "
            "since the workers of a node share a residual"
        )


def _register(ddp: DistributedDataParallel, handle: Hook) -> None:
    try:
        ddp.register_comm_hook(handle, hook)
    except RuntimeError as error:
        handle.detach()
        raise ConfigError(
            "this model already has another communication hook, which torch cannot unregister; wrap the module in a "
            "new DistributedDataParallel"
        ) from error


def _registered(ddp: DistributedDataParallel) -> Hook | None:
    """Returns the hook of this library that a model has, if any."""
    hooks = getattr(ddp, "_comm_hooks", [])
    return next((state for function, state in hooks if function is hook and isinstance(state, Hook)), None)
