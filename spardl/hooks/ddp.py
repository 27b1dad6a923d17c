"""A method as the communication hook of torch's DistributedDataParallel."""

# torch looks at the annotations of a hook, and they must not be strings.

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from spardl.basics.checks import check_kind, check_real, check_settings
from spardl.basics.errors import ConfigError
from spardl.clusters import ProcessGroupCluster
from spardl.hooks.stats import Meter, Stats
from spardl.method.method import Method
from spardl.method.names import MethodName
from spardl.method.provenance import check_owner, check_whole, owner_of
from spardl.method.recipes import make_method
from spardl.schedules.averager import SAVED, Averager, scale_of
from spardl.schedules.parameter_groups import Named

__all__ = ["Hook", "attach", "hook"]


@dataclass
class _Bucket:
    """A bucket of DDP whose gradients are being averaged.

    Attributes:
        views: of the gradients in its buffer, by number of the parameter.
        buffer: what DDP takes the averages from.
        ready: what DDP waits for.
        groups: those that its parameters are in and that are not averaged yet.
    """

    views: Mapping[int, Tensor]
    buffer: Tensor
    ready: torch.futures.Future[Tensor]
    groups: set[int]


class Hook:
    """What a communication hook carries from step to step: ``ddp.register_comm_hook(state, spardl.hook)``.

    DDP forms buckets anew after the first step and in each new process. The groups in which gradients are averaged are
    others, which never change: so training does not depend on the buckets, and continues bit for bit.

    Args:
        ddp: the model.
        method: how to average.
        bucket_mb: most megabytes (2^20 bytes) of gradients that are averaged together; a parameter is never cut.
        timeout: seconds after which a silent worker counts as lost.
        scaler: the GradScaler that scales the loss, if there is one.

    Raises:
        ConfigError: if the method does not run on so many workers, a number is not above 0, or the model has sparse
            gradients.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        method: Method,
        bucket_mb: float = 25.0,
        timeout: float = 1800.0,
        scaler: GradScaler | None = None,
    ) -> None:
        check_settings(bucket_mb, timeout)
        check_kind("scaler", scaler, GradScaler, optional=True)
        for name, module in ddp.module.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                raise ConfigError(f"{name or 'the model'} has sparse gradients; make it with sparse=False")
        self.method = method
        self._named = [Named(*pair) for pair in ddp.module.named_parameters()]
        check_real(self._named)
        self._device = self._named[0].parameter.device
        self._cluster = ProcessGroupCluster(ddp.process_group, self._device, timeout)
        method.communicator.check_workers(self._cluster.size)
        self._cluster.open()
        self._bucket_mb = bucket_mb
        self._scale = scale_of(scaler)
        self._averager: Averager | None = None
        self._saved: Mapping[str, Any] | None = None
        self._seen: list[tuple[GradBucket, torch.futures.Future[Tensor]]] = []
        self._numbers: dict[Tensor, int] = {}
        self._buckets: list[_Bucket] = []
        self._lock = threading.Lock()
        self._attached = True
        self._meter = Meter(self._cluster.ledgers[0], self._cluster.size)
        # torch keeps the first hook of a model for ever: that one knows the last.
        self._last: Hook | None = None
        self._before: Hook | None = None

    def average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Averages a bucket's gradients over all workers, beside the backward pass.

        Args:
            bucket: of DDP.

        Returns:
            The bucket's buffer, shape (n,), once it holds the averages: with the last bucket, that of all is there.

        Raises:
            ConfigError: in the first step, on all workers, if they were not given the same.
            PeerError: if another worker is lost, or does not answer in time.
        """
        if self._last is not None:
            return self._last.average(bucket)
        if not self._attached:
            return _dense(bucket, self._cluster.group)
        ready: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[self._device] if self._device.type == "cuda" else []
        )
        if self._averager is None:
            self._learn(bucket, ready)
        else:
            self._enter(self._averager, bucket, ready)
        if bucket.is_last() and self._averager is not None:
            # DDP would wait, too, but raise another error than what it waits for: one of many lines.
            self._averager.wait()
            self._meter.step()
            self._buckets = []
        # An error is passed on by a callback only; as a value, DDP takes it for a tensor.
        return ready.then(lambda done: done.wait())

    def _learn(self, bucket: GradBucket, ready: torch.futures.Future[Tensor]) -> None:
        """In the first step: which parameters DDP synchronizes is known when it has shown all its buckets."""
        self._seen.append((bucket, ready))
        if not bucket.is_last():
            return
        shown = {parameter for each, _ in self._seen for parameter in each.parameters()}
        named = [pair for pair in self._named if pair.parameter in shown]
        self._numbers = {parameter: number for number, (_, parameter) in enumerate(named)}
        self._averager = self._made(named)
        before = self._before._handed_over(named) if self._before else None
        if before:
            self._averager.inherit(before)
        self._before = None
        for each, future in self._seen:
            self._enter(self._averager, each, future)
        self._seen = []

    def _made(self, named: Sequence[Named]) -> Averager:
        given = {"handle": "attach"}
        averager = Averager(
            self.method,
            named,
            self._cluster,
            self._bucket_mb,
            self._scale,
            self._arrive,
            self._give_up,
            given=given,
        )
        if self._saved is not None:
            averager.load_state_dict(self._saved)
            self._saved = None
        return averager

    def _handed_over(self, named: Sequence[Named]) -> Averager | None:
        """What is carried over of some parameters, if anything is; from here on it is the caller's."""
        if self._averager is None and self._saved is not None:
            self._averager = self._made(named)
        averager, self._averager = self._averager, None
        return averager

    def _follow(self, last: "Hook") -> None:
        """Leaves all to another hook of the same model, ``last``, which goes on with what this one carries.

        Raises:
            ConfigError: if this one, or another that it was left to, is not detached.
        """
        before = self._last or self
        before._check_detached()
        last._before, self._last = before, last

    def _check_detached(self) -> None:
        """Accepts a hook that was left, for another to follow.

        Raises:
            ConfigError: if it was not.
        """
        if (self._last or self)._attached:
            raise ConfigError("a handle averages this model's gradients already; call its detach() before attach()")

    def _enter(self, averager: Averager, bucket: GradBucket, ready: torch.futures.Future[Tensor]) -> None:
        if bucket.index() == 0 and averager.begun:
            averager.wait()  # the last backward pass ended early
            self._buckets = []
        views = {self._numbers[p]: view for p, view in zip(bucket.parameters(), bucket.gradients(), strict=True)}
        groups = {averager.group_of(number) for number in views}
        with self._lock:
            self._buckets.append(_Bucket(views, bucket.buffer(), ready, groups))
        for number, view in views.items():
            averager.put(number, view)

    def _arrive(self, group: int) -> None:
        """A group is averaged: buckets that waited for nothing else are ready."""
        assert self._averager is not None
        with self._lock:
            touched = [bucket for bucket in self._buckets if group in bucket.groups]
        for bucket in touched:
            for number in bucket.views.keys() & set(self._averager.members(group)):
                self._averager.take(number, bucket.views[number])
            bucket.groups.discard(group)
            if not bucket.groups:
                bucket.ready.set_result(bucket.buffer)

    def _give_up(self, error: BaseException) -> None:
        with self._lock:
            waiting = [bucket for bucket in self._buckets if not bucket.ready.done()]
        for bucket in waiting:
            bucket.ready.set_exception(error)  # type: ignore[arg-type]

    # --- what others may ask for

    def state_dict(self) -> dict[str, Any]:
        """What this worker carries from step to step; plain data, to be saved by each rank.

        Empty before the first step.
        """
        if self._averager is None:
            return dict(self._saved or {})
        return self._averager.state_dict()

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Continues from what ``state_dict`` gave on the same rank, of as many.

        Args:
            values: as saved, on any device.

        Raises:
            ConfigError: if it is of another rank, another number of workers, another method, other parameters, or of
                another ``bucket_mb``, or lacks something; of the last three in a fresh process, in the first step.
        """
        fresh = isinstance(values, Mapping) and not values
        self._before = None  # what was carried over is replaced
        if self._averager is None:
            if not fresh:
                check_owner(values, owner_of(self.method, self._cluster.local_ranks[0], self._cluster.size), "groups")
                check_whole(values, SAVED)
            self._saved = dict(values) or None
        elif fresh:
            self._averager.forget()
        else:
            self._averager.load_state_dict(values)

    def stats(self) -> Stats:
        """What this worker sent and spent so far; see :class:`Stats`."""
        averager = self._averager
        nbytes = sum(parameter.nbytes for _, parameter in self._named if parameter.requires_grad)
        ratio = averager.residual_ratio() if averager else None
        return self._meter.stats(nbytes, averager.refused if averager else 0, ratio)

    def reset(self) -> None:
        """Lets ``stats`` begin anew; what is carried from step to step stays."""
        self._meter.reset(self._averager.refused if self._averager else 0)

    @property
    def steps(self) -> int:
        """Synchronizations since this handle was made."""
        return self._meter.steps

    def detach(self) -> None:
        """Averages densely from now on, as DDP without a hook.

        torch takes no hook off, so this one stays, and the next ``attach`` to the model uses it. What is carried over
        waits for it: a method that has a residual, too, goes on with it, another drops it.
        """
        self._attached, self._buckets = False, []
        self._cluster.release()

    def __deepcopy__(self, memo: object) -> None:
        """Copies of a model have no hook: torch registers none for them."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Nor have models that were saved as a whole."""
        return type(None), ()


def hook(state: Hook, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The hook itself, for ``DistributedDataParallel.register_comm_hook(state, hook)``.

    Args:
        state: a :class:`Hook`.
        bucket: of DDP.

    Returns:
        The bucket's buffer, shape (n,), once it holds the averages.
    """
    return state.average(bucket)


def attach(
    ddp: DistributedDataParallel,
    method: MethodName | str | Method = "spardl",
    *,
    bucket_mb: float = 25.0,
    timeout: float = 1800.0,
    scaler: GradScaler | None = None,
    **options: Any,
) -> Hook:
    """Lets DDP average its gradients with a method of this library, from the next backward pass on.

    All workers must call it, with the same arguments. After ``detach`` it may be called again, with another method,
    which goes on with the residual.

    Args:
        ddp: the model; nothing else in the training loop changes.
        method: a name (``spardl.method_names()``), or a :class:`Method`.
        bucket_mb: most megabytes (2^20 bytes) of gradients that are averaged together. Larger groups have less
            overhead, smaller ones start earlier.
        timeout: seconds after which a silent worker counts as lost.
        scaler: the ``GradScaler`` that scales the loss, if there is one: residuals then follow its scale, and a step
            in which some worker's gradient overflowed is skipped by all, without loss.
        **options: of the method, for instance ``density=0.01``, ``teams=2``; see :class:`Recipe`.

    Returns:
        The hook's state: ``state_dict``, ``load_state_dict``, ``stats``, ``reset``, ``detach``.

    Raises:
        ConfigError: if the method or an option is unknown, or does not fit so many workers, or ``ddp`` is no DDP, has
            a hook already, or sparse or complex gradients; in the first step, on all workers, if they were not given
            the same.

    Example:
        >>> ddp_model = nn.parallel.DistributedDataParallel(nn.Linear(100, 10))
        >>> handle = spardl.attach(ddp_model, "spardl", density=0.01)
        >>> ddp_model(torch.randn(5, 100)).sum().backward()
        >>> gradient = torch.cat([parameter.grad.flatten() for parameter in ddp_model.parameters()])
        >>> print(f"{gradient.count_nonzero()} of {len(gradient)} entries are averages; the rest is in the residual")
        10 of 1010 entries are averages; the rest is in the residual
        >>> state = handle.state_dict()
        >>> print(f"step {handle.stats().steps}; to be saved: {', '.join(state)}")
        step 1; to be saved: owner, names, groups, skipped, factor
    """
    _check_wrapped(ddp)
    registered = _registered(ddp)
    if registered:
        registered._check_detached()
    made = Hook(ddp, make_method(method, **options), bucket_mb, timeout, scaler)
    if registered:
        registered._follow(made)
        return made
    try:
        ddp.register_comm_hook(made, hook)
    except RuntimeError as error:
        made.detach()
        raise ConfigError("this model has a communication hook, which torch never takes off; wrap it anew") from error
    return made


def _check_wrapped(ddp: nn.Module) -> None:
    if isinstance(getattr(ddp, "_orig_mod", None), DistributedDataParallel):
        raise ConfigError(
            "attach() needs the DistributedDataParallel itself, and torch.compile() has wrapped it; call "
            "spardl.attach(ddp_model, ...) first, then torch.compile(ddp_model)"
        )
    if not isinstance(ddp, DistributedDataParallel):
        raise ConfigError(
            f"attach() needs a DistributedDataParallel, got a {type(ddp).__name__}; without DDP use spardl.Synchronizer"
        )


def _registered(ddp: DistributedDataParallel) -> Hook | None:
    """The hook of this library that a model has, if it has one."""
    hooks = getattr(ddp, "_comm_hooks", [])
    return next((state for function, state in hooks if function is hook and isinstance(state, Hook)), None)


def _dense(bucket: GradBucket, group: Any) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer().div_(dist.get_world_size(group))
    reduced = dist.all_reduce(buffer, group=group, async_op=True).get_future()
    return reduced.then(lambda done: done.value()[0])
