"""Gradient averaging without DDP: :class:`Synchronizer` averages the gradients of any parameters."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.hooks import RemovableHandle

from spardl.basics.checks import check_bool
from spardl.basics.errors import ConfigError
from spardl.basics.weakrefs import on_finalize, weak_method
from spardl.hooks.averager import Averager, Meter, Named
from spardl.hooks.choosing import choose_method, choose_schedule, default_method
from spardl.hooks.handle import GradientHandle
from spardl.hooks.optimizer_steps import OptimizerSteps
from spardl.method.method import Method
from spardl.method.moving import Optimizers
from spardl.method.names import MethodName
from spardl.schedules import Dear, Schedule

__all__ = ["Synchronizer", "check_still_frozen", "check_still_trained", "trained_and_frozen"]


class Synchronizer(GradientHandle):
    """Replaces every ``.grad`` by its average over all workers, during the backward pass and without DDP.

    A hook at each parameter sends its gradient as soon as the backward pass has completed it, so communication overlaps
    with the rest of the pass. Gradients are averages at the end of a ``with`` block, or after :meth:`wait`::

        synchronizer = spardl.Synchronizer(model.named_parameters(), "spardl", density=0.01)
        for inputs, targets in batches:
            optimizer.zero_grad()
            with synchronizer:
                loss_function(model(inputs), targets).backward()
            optimizer.step()

    All workers must make the same calls in the same order. Their weights must be equal at the start; they are not
    broadcast.

    Args:
        parameters: ``model.named_parameters()`` or ``model.parameters()``, in the order in which the model uses them.
            Those without ``requires_grad`` are ignored.
        method: Name of a method (see ``spardl.method_names()``), or a :class:`Method`; ``None`` means
            ``"spardl"``, or ``"onebit"`` if ``optimizer`` contains Muon.
        group: Process group; ``None`` for the default group.
        bucket_mb: Largest size of a group of gradients in megabytes (2^20 bytes), 25 by default. Parameters are never
            split.
        timeout: Seconds after which a worker that does not answer counts as lost.
        scaler: ``GradScaler`` that scales the loss, if any.
        find_unused: Whether workers determine in every step which parameters no worker used; their gradients stay
            ``None``. If false, workers stop doing so after the first step in which all workers used all parameters, and
            a parameter that is unused later gets a gradient of zeros.
        schedule: When groups of gradients are sent: ``"wfbp"`` (groups of ``bucket_mb``), ``"mg_wfbp"`` or
            ``"layer_fusion"`` (groups chosen by measuring the first steps), or an object such as
            ``spardl.schedules.Wfbp(bucket_mb=50)``.
        optimizer: Optimizer of these parameters, or several, as for :func:`attach`. Most sparse methods then average
            updates instead of gradients (``recipe="recommended"``), and ``step()`` only applies averages.
        clip_norm: If updates are averaged, largest 2-norm of each worker's own gradient.
        ranks_per_node: Number of workers that share a node, or ``"auto"``, as for :func:`attach`.
        **options: Options of the method, for example ``density=0.01``, ``teams=2``; see :class:`Recipe`.

    Raises:
        ConfigError: If there are no parameters, complex ones, or no process group, or the method or an option is
            unknown or does not support the number of workers.

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

    _averager: Averager

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
        method: MethodName | str | Method | None = None,
        *,
        group: Any = None,
        bucket_mb: float | None = None,
        timeout: float = 1800.0,
        scaler: GradScaler | None = None,
        find_unused: bool = False,
        schedule: str | Schedule = "wfbp",
        optimizer: Optimizers = None,
        clip_norm: float | None = None,
        ranks_per_node: int | str = 1,
        **options: Any,
    ) -> None:
        check_bool("find_unused", find_unused)
        chosen = choose_schedule(schedule, bucket_mb)
        if isinstance(chosen, Dear):
            raise ConfigError(
                "schedule=dear updates parameters in the next forward pass, which a Synchronizer cannot observe; wrap "
                'the model in DDP and call spardl.attach(ddp_model, ..., schedule="dear", optimizer=optimizer)'
            )
        method = default_method(options, optimizer) if method is None else method
        made = choose_method(method, options, optimizer=optimizer, ranks_per_node=ranks_per_node)
        # Frozen parameters are only checked to stay frozen.
        trained, self._frozen = trained_and_frozen(parameters)
        super().__init__(
            made,
            chosen,
            [*trained, *self._frozen],
            trained,
            device=trained[-1].parameter.device,
            group=group,
            timeout=timeout,
            scaler=scaler,
            optimizer=optimizer,
            clip_norm=clip_norm,
            ranks_per_node=ranks_per_node,
        )
        given = {"handle": "Synchronizer", "find_unused": find_unused}
        self._averager = self._make_averager(trained, given, find_unused=find_unused)
        self._parameters = self._averager.gradient.parameters
        # Whether backward passes send gradients, which is False in no_sync().
        self._sends, self._detached = True, False
        self._watch_steps()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(weak_method(self._on_gradient, number))
            for number, parameter in enumerate(self._parameters)
        ]
        # torch.compile would otherwise trace the call when the loop itself is compiled.
        self._untraced = weak_method(self._wait)
        self._finalizer = on_finalize(self, _on_dropped, self._hooks, self._optimizer_steps, self._meter)

    def _active_averager(self) -> Averager:
        return self._averager

    def _on_gradient(self, number: int, parameter: Tensor) -> None:
        # ``passed``: a gradient of zeros must not begin a step while other gradients of the pass are ignored.
        if self._ignores([parameter], passed=True):
            return
        # A gradient in no_sync() also counts as a use of the parameter.
        self._averager.engine.note(number)
        if self._sends:
            self._begin_once(self._averager)
            self._averager.put(number, parameter.grad)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager for gradient accumulation: backward passes inside only add to ``.grad`` and send nothing."""
        before, self._sends = self._sends, False
        try:
            yield
        finally:
            self._sends = before

    def wait(self) -> None:
        """Waits until every ``.grad`` is an average. Gradients of parameters that no worker used stay ``None``.

        Raises:
            ConfigError: If a parameter was unfrozen after this object was created.
            PeerError: If another worker is lost or does not answer in time.
        """
        self._untraced()

    def _wait(self) -> None:
        if self._detached:
            return
        check_still_frozen(self._frozen)
        self._end_step(self._averager)

    def __enter__(self) -> Synchronizer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error there may be no gradients to wait for, and other workers may not wait either.
        if kind is None:
            self.wait()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of this worker as plain data; each rank saves its own."""
        return self._averager.state_dict()

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Restores the state that ``state_dict`` returned on the same rank and world size.

        All workers must load states of the same step; otherwise they fail at most 16 steps later.

        Args:
            values: Saved state.

        Raises:
            ConfigError: If the state belongs to another rank, world size, method, model or ``bucket_mb``, or is
                incomplete; nothing is changed then.
        """
        if isinstance(values, Mapping) and "usage" not in values:
            raise ConfigError("this is not the state of a Synchronizer; load what its state_dict() returned")
        self._averager.load_state_dict(values)
        self._optimizer_steps.forget()

    @property
    def _nbytes(self) -> float:
        return sum(parameter.nbytes for parameter in self._parameters)

    def detach(self) -> None:
        """Removes the hooks from the parameters, so that gradients stay each worker's own."""
        self._detached = True
        for hook in self._hooks:
            hook.remove()
        self._release()


def _on_dropped(hooks: Iterable[RemovableHandle], steps: OptimizerSteps, meter: Meter) -> None:
    for hook in hooks:
        hook.remove()
    steps.close()
    if not meter.steps:
        warnings.warn(
            "spardl: a Synchronizer was deleted before it averaged anything, so gradients stay each worker's own; keep "
            "a reference to it, and in every step call wait() or run the backward pass in its with block",
            stacklevel=3,
        )


def trained_and_frozen(
    parameters: Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
) -> tuple[list[Named], list[Named]]:
    """Returns named parameters in two lists: those with ``requires_grad``, and the others.

    Parameters without a name are named by their position.

    Raises:
        ConfigError: If an item is not a parameter, a parameter appears twice, or no parameter is trained.
    """
    found: dict[nn.Parameter, Named] = {}
    several = isinstance(parameters, Iterable) and not isinstance(parameters, nn.Module)
    for number, each in enumerate(parameters if several else [parameters]):
        named = Named(str(number), each) if isinstance(each, nn.Parameter) else each
        if not (isinstance(named, tuple) and len(named) == 2 and isinstance(named[1], nn.Parameter)):
            raise ConfigError(f"parameters contains a {type(each).__name__}; pass model.named_parameters()")
        pair = Named(*named)
        if pair.parameter in found:
            before = found[pair.parameter].name
            raise ConfigError(f"parameters contains {before} twice, the second time as {pair.name}; pass each one once")
        found[pair.parameter] = pair
    trained = [pair for pair in found.values() if pair.parameter.requires_grad]
    if not trained:
        raise ConfigError("parameters is empty or all frozen; pass model.named_parameters() of a model to train")
    return trained, [pair for pair in found.values() if not pair.parameter.requires_grad]


def check_still_frozen(named: Iterable[Named]) -> None:
    """Checks that parameters that were frozen when a handle was created are still frozen.

    Raises:
        ConfigError: If one of them requires a gradient.
    """
    for name, parameter in named:
        if parameter.requires_grad:
            raise ConfigError(
                f"{name} was frozen when this handle was created and is trained now, so workers would diverge; create "
                "the handle after requires_grad_(True)"
            )


def check_still_trained(named: Iterable[Named]) -> None:
    """Checks that parameters that were trained when a handle was created still require gradients.

    Raises:
        ConfigError: If one of them is frozen.
    """
    for name, parameter in named:
        if not parameter.requires_grad:
            raise ConfigError(
                f"{name} was trained when this handle was created and is frozen now, but its residual and momentum "
                "would still change it; call exchange() and close(), then create the handle after "
                "requires_grad_(False)"
            )
