"""A method as a communication hook of torch's DistributedDataParallel: what it carries from step to step."""

import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from spardl.basics.checks import check_kind, check_real, check_seconds
from spardl.basics.errors import ConfigError
from spardl.basics.weak import weakly, when_dropped
from spardl.clusters.precompile import prepare
from spardl.hooks.averager import OTHERS, SAVED, Averager, Beside, Meter, Named, Stats, inherit
from spardl.hooks.buckets import (
    Buckets,
    Formed,
    as_saved,
    check_averaged,
    check_joined,
    check_modules,
    check_wrapped,
    dense,
    end_to_end,
    joining,
    pending,
    unchanged,
    views_of,
)
from spardl.hooks.choosing import check_covered, check_update, choose_method, choose_schedule, options_of, update_of
from spardl.hooks.delayed import DelayedUpdate
from spardl.hooks.optimizer_steps import Discarding, OptimizerSteps, after_backward
from spardl.method.method import Method
from spardl.method.moving import definite
from spardl.method.names import MethodName
from spardl.method.provenance import check_owner, check_whole, owner_of
from spardl.schedules import Dear, Schedule, Training, Wfbp
from spardl.schedules.plain import decay_of
from spardl.schedules.scaling import scale_of
from spardl.vector.flat import CopiedGradient

__all__ = ["Hook", "attach", "hook"]


# torch looks at the annotations of a hook, and they must not be strings.


_Saved = Mapping[str, Any] | None


class _Bucket(NamedTuple):
    """A bucket of DDP whose gradients are being averaged.

    Attributes:
        views: of the gradients in its buffer, by parameter.
        buffer: what DDP takes the averages from.
        ready: what DDP waits for.
    """

    views: Mapping[Tensor, Tensor]
    buffer: Tensor
    ready: torch.futures.Future[Tensor]


class Hook(Discarding):
    """What a communication hook carries from step to step: ``ddp.register_comm_hook(state, hook)``.

    DDP rebuilds its buckets after the first step. Groups do not follow them, so training continues bit for bit.

    Args:
        ddp: the model.
        method: how to average.
        bucket_mb: most megabytes (2^20 bytes) of gradients that are averaged together, where the schedule has such a
            limit; ``None`` for the schedule's own, 25, or DDP's buckets for dense sums. A parameter is never cut.
        timeout: seconds after which a silent worker counts as lost.
        scaler: the GradScaler that scales the loss, if there is one.
        schedule: when gradients are sent, as for :func:`attach`; so are the next two.
        optimizer: of the model.
        clip_norm: largest norm of a gradient, where this limits it.

    Raises:
        ConfigError: if the model is no DDP whose buckets are all shown, or has sparse gradients, the method does not
            run on so many workers, or a number is not above 0.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        method: Method,
        bucket_mb: float | None = None,
        timeout: float = 1800.0,
        scaler: GradScaler | None = None,
        schedule: str | Schedule = "wfbp",
        optimizer: torch.optim.Optimizer | None = None,
        clip_norm: float | None = None,
    ) -> None:
        check_wrapped(ddp)
        check_kind("method", method, Method)
        check_seconds("timeout", timeout)
        check_kind("scaler", scaler, GradScaler, optional=True)
        self.method, self._schedule = definite(method, optimizer), choose_schedule(schedule, bucket_mb)
        check_modules(ddp.module, self._schedule)
        check_update(self._schedule, self.method, optimizer, clip_norm, scaler)
        self._schedule.check(self.method, clips=clip_norm is not None and not self.method.momentum.moved)
        self._named = [Named(*pair) for pair in ddp.module.named_parameters()]
        check_real(self._named)
        left_out = getattr(ddp, "parameters_to_ignore", ())
        averaged = [pair for pair in self._named if pair.name not in left_out]
        trained = self._trained = [pair for pair in averaged if pair.parameter.requires_grad]
        check_covered(self._schedule, self.method, optimizer, trained)
        self._frozen = [pair for pair in averaged if not pair.parameter.requires_grad]
        self._device = self._named[0].parameter.device
        self._cluster = Beside(ddp.process_group, self._device, timeout)
        prepare(self.method, self._cluster.size, (pair.parameter for pair in trained), tells=self._cluster.leads)
        self._cluster.open()
        self._averager: Averager | None = None
        # Whether DDP has shown which parameters it synchronizes, and whether the averager has anything to hand over.
        self._learnt = self._carries = False
        self._numbers: dict[Tensor, int] = {}
        self._attached, self._buckets = True, list[_Bucket]()
        self._meter = Meter(self._cluster.ledgers[0], self._cluster.size)
        # torch keeps the first hook of a model for ever: that one knows the last.
        self._last: Hook | None = None
        self._before: Hook | None = None
        # Where nobody asks for other groups, what is averaged in place stays where DDP has it.
        follows = schedule == Wfbp.name and bucket_mb is None and self.method.in_place
        self._formed = Buckets(ddp, self._named) if follows else None
        self._settled = self._ignores = False
        self._update: DelayedUpdate | None = None
        decay, self._rates = decay_of(self.method.momentum, optimizer), update_of(optimizer, self._named)
        self._training = partial(Training, clip_norm=clip_norm, scale=scale_of(scaler), decay=decay)
        if optimizer is not None and isinstance(self._schedule, Dear):
            # The first forward pass is watched, so this cannot wait for DDP to show its buckets.
            more = {"model": ddp.module, "optimizer": optimizer, "find_unused": ddp.find_unused_parameters}
            made = self._made(Formed(trained, self._schedule), **more)
            self._update, self._learnt = DelayedUpdate(made, ddp.module, optimizer, clip_norm), True
        else:
            self._made_of(trained)  # a state is whole from the beginning, and is checked when it is loaded
        # After that, whose hook hides from an ordered step what is none of its own.
        # torch has this object where Python's garbage collector does not look: it must not have the model's wrapper.
        self._ddp, self._joined = weakref.ref(ddp), joining(ddp)
        self._applied = OptimizerSteps(
            self.method, optimizer, trained, weakly(self._now), delayed=self._update is not None, clip_norm=clip_norm
        )
        super().__init__([pair.parameter for pair in trained], whole=self._applied.updates)
        self._ends = when_dropped(self, self._applied.left)
        mark = self._update.mark if self._update else self._applied.mark
        self._untraced, self._mark_later = weakly(self._average), after_backward(weakly(mark))

    def _now(self) -> Averager | None:
        return self._averager if self._learnt else None

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
        return cast("torch.futures.Future[Tensor]", self._untraced(bucket))

    def _average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if self._last is not None:
            return self._last.average(bucket)
        if not self._attached:
            return dense(bucket, self._cluster.group)
        if bucket.index() == 0:
            self._begin(bucket.parameters())
        if self._ignores:
            if bucket.is_last():
                self._applied.check_ignored()
            return unchanged(bucket, self._device)
        ready = pending(self._device)
        self._buckets.append(_Bucket(views_of(bucket), bucket.buffer(), ready))
        if (averager := self._now()) is not None:
            self._put(averager, self._buckets[-1])
        if bucket.is_last():
            self._end(averager or self._learned())
        # An error is passed on by a callback only; as a value, DDP takes it for a tensor.
        return ready.then(lambda done: done.wait())

    def _begin(self, first: Iterable[Tensor]) -> None:
        """If the last backward pass ended early, what was sent is waited for, and the rest left out."""
        if self._update is not None or self.method.momentum.moved:
            check_joined(self._ddp(), self._joined)
        check_averaged(self._frozen)
        self._buckets = []
        if (averager := self._now()) is not None:
            averager.give_up()
            self._inherit(averager)
        self._ignores = self._discards_all or self._applied.ignores(first)
        if averager is not None and not self._ignores:
            self._applied.begin(averager)
            self._shelve(averager)

    def _put(self, averager: Averager, bucket: _Bucket) -> None:
        if self._formed is not None:
            numbers = [self._numbers[parameter] for parameter in bucket.views]
            averager.lend(numbers, bucket.buffer if end_to_end(bucket.views.values(), bucket.buffer) else None)
        for parameter, view in bucket.views.items():
            averager.put(self._numbers[parameter], view)

    def _end(self, averager: Averager) -> None:
        """The last bucket is there: averages go where DDP looks for them."""
        if self._update is not None:
            usable = self._update.collect()
        else:
            # DDP would wait, too, but raise another error than what it waits for: one of many lines.
            averager.wait()
            usable = not averager.engine.overflowed
        if usable:
            self._applied.averaged(self._discards)
        self._mark_later()
        self._meter.step()
        for views, buffer, ready in self._buckets:
            if self._update is None:
                for parameter, view in views.items():
                    averager.gradient.take(self._numbers[parameter], view)
            elif not usable:
                buffer.fill_(torch.inf)  # for a GradScaler to see
            ready.set_result(buffer)
        self._buckets = []
        if self._formed is not None and not self._settled:
            self._settle(self._formed, averager)

    def _learned(self) -> Averager:
        """In the first step: which parameters DDP synchronizes is known when it has shown all its buckets."""
        shown = {parameter for bucket in self._buckets for parameter in bucket.views}
        check_averaged(each for each in self._trained if each.parameter not in shown)
        averager = self._averager
        if averager is None or averager.known != shown:  # some were frozen after the model was wrapped
            if self._carries:
                raise ConfigError(OTHERS)
            averager = self._made_of([pair for pair in self._named if pair.parameter in shown])
        self._learnt = True
        self._inherit(averager)
        self._applied.take_over(averager)
        self._shelve(averager)
        for bucket in self._buckets:
            self._put(averager, bucket)
        return averager

    def _made_of(self, named: list[Named], after: Averager | None = None, values: _Saved = None) -> Averager:
        """With the order and the groups of a saved state, ``values``, if those may be others than the schedule's."""
        saved = as_saved(named, values) if self._formed and values else None
        # In the order of the model are states that are older than DDP's buckets.
        settled = saved is not None and saved.named != named
        made = self._made(saved if saved and settled else Formed(named, self._schedule), after, values)
        self._settled = settled
        return made

    def _settle(self, formed: Buckets, averager: Averager) -> None:
        """After the first step: from now on, groups are the buckets that DDP forms."""
        self._made(formed.found(self._cluster, averager.gradient.parameters), averager)
        self._settled = True

    def _inherit(self, averager: Averager) -> None:
        """Goes on with what an earlier hook carried."""
        if before := (self._before._handed_over(averager) if self._before else None):
            inherit(averager, before)
        self._before, self._carries = None, True

    def _made(self, formed: Formed, after: Averager | None = None, values: _Saved = None, **more: Any) -> Averager:
        made = self._training(**{"model": None, "optimizer": None, **more}, gradient=CopiedGradient(formed.named))
        given = {"handle": "attach", **options_of(self._schedule), "clip_norm": made.clip_norm}
        averager = Averager(self.method, formed.schedule, made, self._cluster, given, self._rates)
        if after is not None:
            averager.succeed(after)
        if values is not None:
            averager.load_state_dict(values)
        self._numbers = {parameter: number for number, parameter in enumerate(averager.gradient.parameters)}
        self._averager = averager
        return averager

    def _handed_over(self, to: Averager) -> Averager | None:
        """What is carried over of some parameters, if anything is; from here on it is the caller's, ``to``."""
        averager, self._averager = self._averager, None
        # One that made no step has what the one before it left.
        return averager if self._carries else (self._before._handed_over(to) if self._before else None)

    def follow(self, last: "Hook") -> None:
        """Leaves all to another hook of the same model, ``last``, which goes on with what this one carries.

        Raises:
            ConfigError: if this one, or another that it was left to, is not detached.
        """
        before = self._last or self
        before.check_detached()
        last._before, self._last = before, last

    def check_detached(self) -> None:
        """Accepts a hook that was left, for another to follow.

        Raises:
            ConfigError: if it was not.
        """
        if (self._last or self)._attached:
            raise ConfigError("a handle averages this model's gradients already; call its detach() before attach()")

    # --- what others may ask for

    def state_dict(self) -> dict[str, Any]:
        """What this worker carries from step to step: plain data that each rank saves, whole before the first step.

        ``torch.distributed.checkpoint`` needs a key for each rank, such as ``f"spardl_{rank}"``.
        """
        if self._averager is None:
            return {}  # another handle of the model goes on with it
        if self._before is not None:
            self._inherit(self._averager)
        return self._averager.state_dict()

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Continues from what ``state_dict`` gave on the same rank, of as many.

        All workers load states of one step; those that differ are refused at most 16 steps later.

        Args:
            values: as saved, on any device. An empty mapping is a reset: the handle begins as before its first step.

        Raises:
            ConfigError: if it is of another rank, another number of workers, another method, other parameters, or of
                another ``bucket_mb``, or lacks something; nothing is changed then.
        """
        averager = self._averager
        if averager is None:
            raise ConfigError("another handle of this model goes on with what this one carried; load the state there")
        fresh = isinstance(values, Mapping) and not values
        if not fresh:
            check_owner(values, owner_of(self.method, self._cluster.local_ranks[0], self._cluster.size), "groups")
            check_whole(values, SAVED)
        if self._update is not None:
            if not fresh:
                averager.check_state(values)
            self._update.settle()
        if fresh:
            averager.forget()
        else:
            self._load(averager, values)
        self._applied.forget()
        self._before, self._carries = None, not fresh  # what was carried over is replaced

    def _load(self, averager: Averager, values: Mapping[str, Any]) -> None:
        """Continues from a state whose groups, or frozen parameters before the first step, may be others than now."""
        names = averager.gradient.names if self._learnt else values["names"]
        named = [pair for pair in self._named if pair.name in names]
        if not named or (self._formed is None and averager.known == {pair.parameter for pair in named}):
            averager.load_state_dict(values)
        else:
            self._made_of(named, averager, values)

    def flush(self) -> None:
        """Sees to it that weights are those after the last step: only ``schedule="dear"`` updates later than that."""
        if self._update is not None:
            self._update.flush()

    def stats(self) -> Stats:
        """What this worker sent and spent so far; see :class:`Stats`."""
        averager = self._averager
        nbytes = sum(parameter.nbytes for _, parameter in self._named if parameter.requires_grad)
        waiting = averager.engine.waiting() if averager else None
        return self._meter.stats(nbytes, averager.refused if averager else 0, waiting)

    def reset(self) -> None:
        """Lets ``stats`` begin anew; what is carried from step to step stays."""
        self._meter.reset(self._averager.refused if self._averager else 0)

    @property
    def steps(self) -> int:
        """Synchronizations since this handle was made."""
        return self._meter.steps

    @property
    def gradient_norm(self) -> float | None:
        """2-norm of this worker's last gradient before ``clip_norm``; ``None`` without ``optimizer=`` or a limit."""
        return self._averager.engine.limit.measured if self._averager else None

    def detach(self) -> None:
        """Averages densely from now on, as DDP without a hook.

        torch cannot unregister a hook, so this one stays, and the next ``attach`` to the model uses it. What is carried
        over waits for it: another method that has a residual goes on with it, and one that has none drops it. An
        optimizer whose state was moved has its own again, which begins anew.

        Raises:
            PeerError: if a worker is lost that ``schedule="dear"`` waits for; all is taken off the model even so.
        """
        update, self._update = self._update, None
        try:
            if update is not None:
                update.close()
        finally:
            self._leave()

    def _leave(self) -> None:
        if self._ends.detach():
            self._applied.close()
        if self._formed is not None:
            self._formed.close()
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


# Two lines for a loop with torch's DistributedDataParallel.


def attach(
    ddp: DistributedDataParallel,
    method: MethodName | str | Method = "spardl",
    *,
    bucket_mb: float | None = None,
    timeout: float = 1800.0,
    scaler: GradScaler | None = None,
    schedule: str | Schedule = "wfbp",
    optimizer: torch.optim.Optimizer | None = None,
    clip_norm: float | None = None,
    **options: Any,
) -> Hook:
    """Lets DDP average its gradients with a method of this library, from the next backward pass on.

    All workers must call it, with the same arguments; again after ``detach``, to go on with another method.

    Args:
        ddp: the model; nothing else in the training loop changes.
        method: a name (``spardl.method_names()``), or a :class:`Method`.
        bucket_mb: most megabytes (2^20 bytes) that are averaged together; ``None``: 25, for dense sums DDP's buckets.
        timeout: seconds after which a silent worker counts as lost.
        scaler: the ``GradScaler`` that scales the loss, if there is one: residuals then follow its scale, and a step
            in which some worker's gradient overflowed is skipped by all, without loss.
        schedule: ``"wfbp"`` (groups of ``bucket_mb``), ``"mg_wfbp"`` or ``"layer_fusion"`` (groups as measured in the
            first steps), ``"dear"`` (sends during the next forward pass as well), or a schedule
            such as ``spardl.schedules.Wfbp(50)``.
        optimizer: of the model, SGD, Adam or AdamW: most sparse methods then average its updates instead of gradients.
            Each worker keeps moments of its own, taken over from a trained optimizer, and ``step()`` only applies
            averages. With ``"dear"`` it orders an
            update that the next forward pass makes: read weights after ``handle.flush()``; state_dicts do that.
        clip_norm: largest 2-norm of each worker's own gradient then; with ``"dear"`` otherwise that of the average.
        **options: of the method, for instance ``density=0.01``, ``teams=2``; see :class:`Recipe`.

    Returns:
        The hook's state: ``state_dict``, ``load_state_dict``, ``stats``, ``reset``, ``discard``, ``detach``.

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
        step 1; to be saved: owner, names, partition, groups, usage, kept, factor, skipped
    """
    if registered := _registered(ddp):
        registered.check_detached()
    chosen = choose_method(method, options, schedule)
    made = Hook(ddp, chosen, bucket_mb, timeout, scaler, schedule, optimizer, clip_norm)
    if registered:
        registered.follow(made)
    else:
        _register(ddp, made)
    return made


def _register(ddp: DistributedDataParallel, made: Hook) -> None:
    try:
        ddp.register_comm_hook(made, hook)
    except RuntimeError as error:
        made.detach()
        raise ConfigError("this model has a communication hook, which torch cannot unregister; wrap it anew") from error


def _registered(ddp: DistributedDataParallel) -> Hook | None:
    """The hook of this library that a model has, if it has one."""
    hooks = getattr(ddp, "_comm_hooks", [])
    return next((state for function, state in hooks if function is hook and isinstance(state, Hook)), None)
