"""Averages the gradients of any parameters, without DDP: beside the backward pass, as they come."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.hooks import RemovableHandle

from spardl.basics.checks import check_flag, check_kind, check_real, check_seconds
from spardl.basics.errors import ConfigError
from spardl.basics.weak import weakly, when_dropped
from spardl.clusters.precompile import prepare
from spardl.hooks.averager import Averager, Beside, Meter, Named, Stats
from spardl.hooks.choosing import check_covered, check_update, choose_method, choose_schedule, options_of, update_of
from spardl.hooks.optimizer_steps import Discarding, OptimizerSteps
from spardl.method.method import Method
from spardl.method.moving import definite
from spardl.method.names import MethodName
from spardl.schedules import Dear, Schedule, Training
from spardl.schedules.plain import decay_of
from spardl.schedules.scaling import scale_of
from spardl.vector.flat import CopiedGradient

__all__ = ["Synchronizer", "check_frozen", "check_trained", "trained_and_frozen"]


class Synchronizer(Discarding):
    """Replaces every ``.grad`` by its average over all workers, who call the same in the same order.

    A hook at each parameter hands its gradient over as soon as a backward pass has completed it; messages travel while
    the pass goes on. At the end of a ``with`` block, or at :meth:`wait`, gradients are averages::

        synchronizer = spardl.Synchronizer(model.named_parameters(), "spardl", density=0.01)
        for inputs, targets in batches:
            optimizer.zero_grad()
            with synchronizer:
                loss_function(model(inputs), targets).backward()
            optimizer.step()

    Weights must be equal on all workers at first; this sends none.

    Args:
        parameters: as ``model.named_parameters()`` or ``model.parameters()`` has them, in the order in which the model
            uses them. Those without ``requires_grad`` are left alone.
        method: a name (``spardl.method_names()``), or a :class:`Method`.
        group: a process group; ``None`` for the default one.
        bucket_mb: most megabytes (2^20 bytes) of gradients that are averaged together, 25 unless said otherwise; a
            parameter is never cut.
        timeout: seconds after which a silent worker counts as lost.
        scaler: the ``GradScaler`` that scales the loss, if there is one.
        find_unused: whether workers ask one another in every step which parameters nobody used; otherwise only until a
            step in which all used all. One that is left out later then gets zeros for a gradient.
        schedule: in which groups: ``"wfbp"`` (of ``bucket_mb``), ``"mg_wfbp"`` or ``"layer_fusion"`` (as measured in
            the first steps), or a schedule such as ``spardl.schedules.Wfbp(bucket_mb=50)``.
        optimizer: of these parameters. Where the method moves its state before compression (``recipe="recommended"`` of
            most sparse ones), its ``step()`` only applies averages from here on.
        clip_norm: largest 2-norm of this worker's own gradient, where that is so.
        **options: of the method, for instance ``density=0.01``, ``teams=2``; see :class:`Recipe`.

    Raises:
        ConfigError: if there are no parameters, or complex ones, or no process group, the method or an option is
            unknown, or does not fit so many workers.

    Example:
        >>> model = nn.Linear(100, 10)
        >>> synchronizer = spardl.Synchronizer(model.named_parameters(), "spardl", density=0.01)
        >>> with synchronizer:
        ...     model(torch.randn(5, 100)).sum().backward()
        >>> gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        >>> print(f"{gradient.count_nonzero()} of {len(gradient)} entries after {synchronizer.stats().steps} step")
        10 of 1010 entries after 1 step
        >>> synchronizer.detach()
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
        method: MethodName | str | Method = "spardl",
        *,
        group: Any = None,
        bucket_mb: float | None = None,
        timeout: float = 1800.0,
        scaler: GradScaler | None = None,
        find_unused: bool = False,
        schedule: str | Schedule = "wfbp",
        optimizer: torch.optim.Optimizer | None = None,
        clip_norm: float | None = None,
        **options: Any,
    ) -> None:
        check_seconds("timeout", timeout)
        check_kind("scaler", scaler, GradScaler, optional=True)
        check_flag("find_unused", find_unused)
        chosen = choose_schedule(schedule, bucket_mb)
        if isinstance(chosen, Dear):
            raise ConfigError(
                "schedule=dear updates parameters during the next forward pass, which this does not see; wrap the "
                'model in DDP, and call spardl.attach(ddp_model, ..., schedule="dear", optimizer=optimizer)'
            )
        self.method = definite(choose_method(method, options), optimizer)
        check_update(chosen, self.method, optimizer, clip_norm, scaler)
        named, self._frozen = trained_and_frozen(parameters)
        if not named:
            raise ConfigError("there are no parameters to average the gradients of")
        check_real(named)
        check_covered(chosen, self.method, optimizer, named)
        gradient = CopiedGradient(named)
        self._parameters = gradient.parameters
        self._cluster = Beside(group, self._parameters[0].device, timeout)
        prepare(self.method, self._cluster.size, self._parameters, tells=self._cluster.leads)
        self._cluster.open()
        training = Training(
            None,
            gradient,
            None,
            clip_norm,
            scale_of(scaler),
            find_unused,
            decay_of(self.method.momentum, optimizer),
        )
        given = {"handle": "Synchronizer", **options_of(chosen), "find_unused": find_unused}
        update = update_of(optimizer, [*named, *self._frozen])
        self._averager = Averager(self.method, chosen, training, self._cluster, given, update)
        self._applied = OptimizerSteps(self.method, optimizer, named, weakly(self._now), clip_norm=clip_norm)
        self._meter = Meter(self._cluster.ledgers[0], self._cluster.size)
        self._watches, self._detached = True, False
        super().__init__(self._parameters, whole=self._applied.updates)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(weakly(self._arrive, number))
            for number, parameter in enumerate(self._parameters)
        ]
        self._untraced = weakly(self._wait)
        self._ends = when_dropped(self, _left, self._hooks, self._applied, self._meter)

    def _now(self) -> Averager:
        return self._averager

    def _arrive(self, number: int, parameter: Tensor) -> None:
        if self._ignores([parameter]):
            return
        self._averager.engine.note(number)
        if self._watches:
            self._begin()
            self._averager.put(number, parameter.grad)

    def _ignores(self, parameters: Iterable[Tensor]) -> bool:
        """Whether gradients that a backward pass leaves in some parameters must not count."""
        return self._discards_all or self._applied.ignores(parameters)

    def _begin(self) -> None:
        if not self._averager.begun:
            self._applied.begin(self._averager)
            self._shelve(self._averager)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Lets the backward passes inside add to ``.grad`` only: all but the last of a step."""
        before, self._watches = self._watches, False
        try:
            yield
        finally:
            self._watches = before

    def wait(self) -> None:
        """Waits until every ``.grad`` is an average. One that is known to be nobody's stays ``None``.

        Raises:
            ConfigError: if a parameter is trained that was frozen when this was made.
            PeerError: if another worker is lost, or does not answer in time.
        """
        self._untraced()

    def _wait(self) -> None:
        if self._detached:
            return
        check_frozen(self._frozen)
        if self._ignores(self._parameters):
            self._applied.check_ignored()
            return
        self._begin()
        for number in self._averager.missing():
            gradient = self._parameters[number].grad
            self._averager.put(number, gradient)
            if gradient is not None and gradient.any():
                self._averager.note(number)  # the loop set it, and no hook has seen it
        self._averager.wait()
        if not self._averager.engine.overflowed:
            self._applied.averaged(self._discards)
        self._meter.step()
        unused = set(self._averager.engine.unused())
        for number, parameter in enumerate(self._parameters):
            if number not in unused and parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                self._averager.gradient.take(number, parameter.grad)
        self._applied.mark()

    def __enter__(self) -> Synchronizer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.wait()

    def state_dict(self) -> dict[str, Any]:
        """What this worker carries from step to step; plain data, to be saved by each rank."""
        return self._averager.state_dict()

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Continues from what ``state_dict`` gave on the same rank, of as many.

        All workers load states of one step; those that differ are refused at most 16 steps later.

        Args:
            values: as saved.

        Raises:
            ConfigError: if it is of another rank, another number of workers, another method, other parameters, or of
                another ``bucket_mb``, or lacks something; nothing is changed then.
        """
        if isinstance(values, Mapping) and "usage" not in values:
            raise ConfigError("this is no state of a Synchronizer; load what its state_dict() gave")
        self._averager.load_state_dict(values)
        self._applied.forget()

    def stats(self) -> Stats:
        """What this worker sent and spent so far; see :class:`Stats`."""
        nbytes = sum(parameter.nbytes for parameter in self._parameters)
        return self._meter.stats(nbytes, self._averager.refused, self._averager.engine.waiting())

    def reset(self) -> None:
        """Lets ``stats`` begin anew; what is carried from step to step stays."""
        self._meter.reset(self._averager.refused)

    def detach(self) -> None:
        """Takes the hooks off the parameters: gradients are each worker's own again."""
        self._detached = True
        if self._ends.detach():
            _leave(self._hooks, self._applied)
        self._cluster.release()


def _leave(hooks: Iterable[RemovableHandle], applied: OptimizerSteps) -> None:
    for hook in hooks:
        hook.remove()
    applied.close()


def _left(hooks: Iterable[RemovableHandle], applied: OptimizerSteps, meter: Meter) -> None:
    """Nobody has the synchronizer any more, so nothing would see what its hooks bring."""
    _leave(hooks, applied)
    if not meter.steps:
        warnings.warn(
            "spardl: a Synchronizer was dropped before it averaged anything, and gradients stay each worker's own; "
            "keep it, and in every step call wait(), or run the backward pass in a with block of it",
            stacklevel=3,
        )


def trained_and_frozen(
    parameters: Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
) -> tuple[list[Named], list[Named]]:
    """Parameters and their names, those that come without one numbered: those that are trained, and the others.

    Raises:
        ConfigError: if something else is among them, or one of them twice.
    """
    found: dict[nn.Parameter, Named] = {}
    several = isinstance(parameters, Iterable) and not isinstance(parameters, nn.Module)
    for number, each in enumerate(parameters if several else [parameters]):
        named = Named(str(number), each) if isinstance(each, nn.Parameter) else each
        if not (isinstance(named, tuple) and len(named) == 2 and isinstance(named[1], nn.Parameter)):
            raise ConfigError(f"parameters has a {type(each).__name__}; give model.named_parameters()")
        pair = Named(*named)
        if pair.parameter in found:
            before = found[pair.parameter].name
            raise ConfigError(f"parameters has {before} twice, the second time as {pair.name}; give each once")
        found[pair.parameter] = pair
    trained = [pair for pair in found.values() if pair.parameter.requires_grad]
    return trained, [pair for pair in found.values() if not pair.parameter.requires_grad]


def check_frozen(named: Iterable[Named]) -> None:
    """Accepts parameters that were frozen when a handle was made, and still are.

    Raises:
        ConfigError: if one is trained now.
    """
    for name, parameter in named:
        if parameter.requires_grad:
            raise ConfigError(
                f"{name} is trained, and was frozen when this handle was made, which leaves it alone: workers would "
                "drift apart; make the handle anew after requires_grad_(True)"
            )


def check_trained(named: Iterable[Named]) -> None:
    """Accepts parameters that were trained when a handle was made, and still are.

    Raises:
        ConfigError: if one is frozen now.
    """
    for name, parameter in named:
        if not parameter.requires_grad:
            raise ConfigError(
                f"{name} is frozen, and was trained when this handle was made, whose residual and momentum would go on "
                "to move it; call exchange() and close(), and make the handle anew after requires_grad_(False)"
            )
