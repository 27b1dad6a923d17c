"""Checks that each average is applied by exactly one ``optimizer.step()``, and that no step applies anything else.

A handle with ``optimizer=`` keeps the optimizer's moments itself, so a lost or doubled update would corrupt residuals
and moments without notice. Without ``optimizer=``, it warns of mistakes that version counters of weights reveal.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from spardl.basics.errors import ConfigError
from spardl.basics.weakrefs import weak_method
from spardl.hooks.averager import ALWAYS_CHECKED, CHECK_INTERVAL, Averager, Named
from spardl.hooks.choosing import check_known
from spardl.method.method import Method
from spardl.schedules.apply_update import ApplyUpdate, take_over
from spardl.vector.flat import local_part

__all__ = [
    "GradientMarks",
    "OptimizerSteps",
    "PassWatch",
    "StepGuard",
    "after_backward",
    "check_no_gradients",
    "discarded_parameters",
    "is_unchanged",
    "warn_clipped",
]


# --- gradients that the loop discards


def discarded_parameters(
    parameters: Iterable[nn.Parameter] | None, averaged: Set[nn.Parameter], *, whole: bool
) -> frozenset[nn.Parameter]:
    """Checks the argument of ``discard``, and returns the parameters whose gradients are discarded.

    Args:
        parameters: Argument of ``discard``; ``None`` for all.
        averaged: Parameters that the handle averages.
        whole: Whether an optimizer step always applies the averages of all parameters, so that none can be left out.

    Raises:
        ConfigError: If the handle does not average one of the parameters, or only some are given with ``whole``.
    """
    if parameters is None:
        return frozenset(averaged)
    chosen = frozenset([parameters] if isinstance(parameters, nn.Parameter) else parameters)
    if others := len(chosen - averaged):
        raise ConfigError(
            f"discard() got {others} parameters that this handle does not average; pass parameters of its model, for "
            "example model.discriminator.parameters()"
        )
    if whole and chosen and chosen != averaged:
        raise ConfigError(
            f"discard() got {len(chosen)} of {len(averaged)} parameters, but with optimizer= a step applies the "
            "averages of all; call discard() without arguments, or create the handle without optimizer="
        )
    return chosen


# --- averages that no step applied, and steps that would apply anything else


class GradientMarks:
    """Records the versions of gradients, and detects from these which gradients were replaced or changed in place.

    A changed ``_version`` counts as a change, as it does for autograd. That includes a multiplication by 1, which
    ``clip_grad_norm_`` performs below its limit.
    """

    def __init__(self) -> None:
        self._marks: dict[nn.Parameter, tuple[weakref.ref[Tensor], int]] = {}
        self._version_steps: int | None = None

    def set(self, parameters: Iterable[nn.Parameter]) -> None:
        """Records each parameter's gradient tensor and its version; keeps the records of other parameters."""
        for each in parameters:
            self._marks.pop(each, None)
            if each.grad is not None:
                self._marks[each] = weakref.ref(each.grad), each.grad._version

    def clear(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Deletes the recorded gradients of some ``parameters``; of all if ``None``."""
        for each in list(self._marks) if parameters is None else parameters:
            self._marks.pop(each, None)

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._marks

    def pop(self, parameter: nn.Parameter) -> bool | None:
        """Deletes the record of a parameter.

        Returns:
            Whether the gradient is unchanged since it was recorded; ``None`` if the parameter had no record.
        """
        return self._same(parameter, self._marks.pop(parameter)) if parameter in self._marks else None

    def changed(self, parameters: Sequence[nn.Parameter], *, scaled: bool = False) -> list[nn.Parameter]:
        """Returns the parameters whose gradients have changed since they were recorded and are not zero now.

        Args:
            parameters: Parameters to check; those without a record are skipped.
            scaled: Whether a GradScaler may have unscaled the gradients, which does not count as a change.
        """
        found = [each for each in parameters if each in self._marks and not self._same(each, self._marks[each])]
        if found and scaled:
            if self._version_steps is None:
                self._version_steps = _version_steps_of_unscale(found[0].device)
            # Gradients that DDP keeps as views of one bucket share a version counter.
            sharing = Counter(map(_storage, parameters))
            most = {each: self._version_steps * sharing[_storage(each)] for each in found}
            found = [each for each in found if not self._same(each, self._marks[each], most[each])]
        return [each for each in found if _has_gradient(each)]

    def _same(self, parameter: nn.Parameter, mark: tuple[weakref.ref[Tensor], int], most: int = 0) -> bool:
        reference, version = mark
        gradient = parameter.grad
        return gradient is not None and reference() is gradient and version <= gradient._version <= version + most


def after_backward(call: Callable[[], None]) -> Callable[[], None]:
    """Returns a function to call in DDP's communication hook: it schedules ``call`` for the end of the backward pass.

    At the end of the pass, DDP copies the averages into the gradients; ``call`` runs after that.

    Args:
        call: Function to call at the end; ``torch.compile`` must not trace it.
    """
    engine = torch.autograd.Variable._execution_engine
    # DDP queues its own callback after its last hook, so queue in two stages to run after that callback.
    later = torch.compiler.disable(lambda: engine.queue_callback(call))

    def queue() -> None:
        # DDP's join() calls hooks outside backward passes, where the engine refuses callbacks.
        with suppress(RuntimeError):
            engine.queue_callback(later)

    return queue


class StepGuard:
    """Detects averages that no ``optimizer.step()`` has applied, and averages to which gradients were added.

    Args:
        named: Trained parameters whose gradients are averaged.
        optimizers: Optimizers whose steps apply the averages, each to its own parameters.
        awaited: Parameters without whose gradients DDP averages nothing.
        in_place: Whether ``.grad`` holds averages after a backward pass; otherwise it holds the worker's own gradients.
    """

    def __init__(
        self,
        named: Sequence[Named],
        optimizers: Sequence[torch.optim.Optimizer],
        awaited: Sequence[Named],
        *,
        in_place: bool,
    ) -> None:
        self._awaited, self._in_place, self._steps = awaited, in_place, 0
        # Optimizers whose step has not applied the averages, and the one whose step is applying them right now.
        self._optimizers = tuple(optimizers)
        self._pending: set[torch.optim.Optimizer] = set()
        self._applying: torch.optim.Optimizer | None = None
        self._warned = False
        # Parameters with a backward pass since the last averages, and those whose gradient was not zero before it.
        self._passed: set[nn.Parameter] = set()
        self._mixed: dict[nn.Parameter, str] = {}
        # Gradients that the last step applied. The next pass divides them into stale (not cleared) and cleared ones.
        self._applied_marks = GradientMarks()
        self._stale: dict[nn.Parameter, str] = {}
        self._cleared: set[nn.Parameter] = set()
        self._hooks = []
        for each in self._optimizers:
            self._hooks += [
                each.register_step_pre_hook(torch.compiler.disable(self._before_step)),
                each.register_step_post_hook(torch.compiler.disable(self._after_step)),
            ]
        # Hooks of autograd nodes, because torch.compile would trace hooks of the parameters themselves.
        self._nodes = [get_gradient_edge(each.parameter).node for each in named]
        pairs = zip(self._nodes, named, strict=True)
        self._hooks += [node.register_prehook(weak_method(self.before_gradient, each)) for node, each in pairs]

    def discarded(self) -> bool:
        """Returns whether averages were cleared before a step applied them; warns the first time.

        Call this when the next gradients are complete, before they are averaged.

        Raises:
            ConfigError: If only some of the optimizers have applied the averages.
        """
        if not self._pending or self._mixed:
            return False
        if len(self._pending) < len(self._optimizers):
            kinds = " and ".join(type(each).__name__ for each in self._optimizers if each in self._pending)
            raise ConfigError(
                f"step() of {kinds} was not called after the last backward pass, although step() of another optimizer "
                "of this handle was; call step() of all optimizers in every step"
            )
        self._pending.clear()
        if not self._warned:
            warnings.warn(
                "spardl: averaged gradients were cleared before optimizer.step() applied them, so they went back to "
                "the residuals, and each step now takes a snapshot to undo such backward passes; run backward passes "
                "whose gradients are not used (such as those of a discriminator in the generator's step) in "
                "handle.discard() or no_sync(), on all workers.",
                stacklevel=4,
            )
            self._warned = True
        return True

    def stale(self, parameters: Iterable[Tensor], *, passed: bool = False) -> bool:
        """Returns whether a backward pass adds to gradients that the last step applied and that were not cleared.

        No step can use such sums.

        Args:
            parameters: Parameters that got their first gradient of the current step in this pass, of any shape.
            passed: Whether the running pass has computed the gradients of all of them. Otherwise, they may have been
                cleared since their last pass.
        """
        known = (each for each in parameters if isinstance(each, nn.Parameter) and each in self._stale)
        found = [each for each in known if passed or _has_gradient(each)]
        if passed:  # the next pass compares with these marks to find the gradients that the loop has cleared
            self._applied_marks.set(found)
        return bool(found)

    def check_stale(self) -> None:
        """Checks a backward pass that added to gradients which the last step had already applied.

        Raises:
            ConfigError: If some gradients were cleared before the pass and others were not.
        """
        if self._stale and self._cleared:
            self._raise_mixed(min(self._stale.values()))

    def averaged(self) -> None:
        """Records that new averages are ready for the optimizer to apply.

        Raises:
            ConfigError: If gradients were added to earlier averages that had not been cleared.
        """
        if self._mixed:
            self._raise_mixed(min(self._mixed.values()))
        self._pending = set(self._optimizers)
        self._steps += 1
        self._passed.clear()
        self._stale.clear()
        self._cleared.clear()

    def _raise_mixed(self, name: str) -> None:
        raise ConfigError(
            f"the gradient of {name} still contained an earlier average when it was averaged; call "
            "optimizer.zero_grad() before the first backward pass of each step, and run all backward passes of a step "
            "except the last, and those whose gradients are not used, in no_sync()"
        )

    def check_step(self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        """Checks that an optimizer step applies new averages, and nothing else.

        Args:
            optimizer: Optimizer whose step begins.
            parameters: Parameters of the optimizer that have gradients.

        Raises:
            ConfigError: If there are no new averages since the last step, or a backward pass added gradients to them.
        """
        if optimizer not in self._pending:
            if stale := [self._stale[each] for each in parameters if each in self._stale and _has_gradient(each)]:
                raise ConfigError(
                    f"step() would apply the gradient of {min(stale)} twice: the previous step() applied it, and a new "
                    "backward pass added to it; call optimizer.zero_grad() before the first backward pass of each step"
                )
            own = {each for group in optimizer.param_groups for each in group["params"]}
            check_no_gradients(parameters, [each for each in self._awaited if each.parameter in own])
        mixed = [self._mixed[each] for each in parameters if each in self._mixed and _has_gradient(each)]
        if mixed:
            raise ConfigError(
                f"a backward pass in no_sync() added to the gradient of {min(mixed)} after it was averaged, so workers "
                "would diverge; run all backward passes of a step except the last in no_sync(), and average in the "
                "last one"
            )

    def forget(self) -> None:
        """Deletes the record of averages that no step has applied yet; to be called after ``load_state_dict``."""
        self._pending.clear()
        self._passed.clear()
        self._mixed.clear()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._applying = optimizer if optimizer in self._pending else None
        self._pending.discard(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._applying:
            # The loop may already have cleared the gradients of another optimizer.
            self._applied_marks.set(each for group in optimizer.param_groups for each in group["params"])
            self._stale.clear()
            self._cleared.clear()
        self._applying = None

    def before_gradient(self, named: Named, *_: object) -> None:
        """Records the state of a parameter's gradient; must run before a backward pass adds to this gradient."""
        name, parameter = named
        before, first = parameter.grad, parameter not in self._passed
        self._passed.add(parameter)
        self._sort_applied(named)
        # Reading entries costs time where the loop zeroes gradients instead of setting them to None, so the check is
        # skipped in most steps whose averages were applied.
        stale, several = parameter in self._stale, len(self._optimizers) > 1
        # A loop may omit zero_grad() of one optimizer, whose gradients need not be the first of the pass.
        checks = self._pending or (several if stale else self._in_place and self._steps % CHECK_INTERVAL == 1)
        if first and checks and before is not None and local_part(before).any():
            self._mixed[parameter] = name
        elif parameter in self._mixed and (before is None or not local_part(before).any()):
            del self._mixed[parameter]  # the loop cleared it after that pass

    def _sort_applied(self, named: Named) -> None:
        """Records whether the gradient that the last step applied has been cleared since then."""
        name, parameter = named
        if parameter in self._stale:
            # Zeros that are unchanged since an ignored pass were not cleared; the applied gradient itself may be zero.
            if not self._applied_marks.pop(parameter) and not _has_gradient(parameter):
                del self._stale[parameter]
        elif (same := self._applied_marks.pop(parameter)) is not None:
            if not same:
                self._cleared.add(parameter)
            # torch's foreach functions clear a DTensor without increasing its version counter.
            elif local_part(parameter) is parameter or _has_gradient(parameter):
                self._stale[parameter] = name

    def close(self) -> None:
        """Removes all hooks."""
        for hook in self._hooks:
            hook.remove()
        self._nodes = []


class PassWatch:
    """Checks the backward passes of a handle without ``optimizer=``; warns of gradients that are lost or not averaged.

    Such a handle does not know the optimizer. An update is recognized by the version counter of a weight, which changes
    when the weight is updated in place.

    Args:
        named: Trained parameters whose gradients are averaged.
        carries: Whether the method keeps residuals or moments.
    """

    def __init__(self, named: Sequence[Named], *, carries: bool) -> None:
        self._carries = carries
        # Versions of weights in passes that are not averaged yet, and in the last pass that was averaged.
        self._passed: dict[nn.Parameter, int] = {}
        self._averaged: dict[nn.Parameter, int] = {}
        self._updated: set[nn.Parameter] = set()
        self._warned: set[str] = set()
        self._nodes = [get_gradient_edge(each.parameter).node for each in named]
        pairs = zip(self._nodes, named, strict=True)
        self._hooks = [node.register_prehook(weak_method(self._before_gradient, each)) for node, each in pairs]

    def averaged(self, discarded: Collection[nn.Parameter]) -> None:
        """Records that the gradients of the pass, and of earlier ones in ``no_sync()``, have been averaged.

        Args:
            discarded: Parameters whose averages the training loop clears before a step applies them.
        """
        self._averaged = {each: version for each, version in self._passed.items() if each not in discarded}
        self._passed = {}

    def forget(self) -> None:
        """Forgets all recorded backward passes, so that no later warning refers to them."""
        self._passed, self._averaged = {}, {}

    def _before_gradient(self, named: Named, *_: object) -> None:
        """Runs before a backward pass adds to a gradient."""
        name, parameter = named
        version = parameter._version
        averaged, passed = self._averaged.pop(parameter, None), self._passed.get(parameter)
        if averaged is not None:
            if averaged != version:
                self._updated.add(parameter)
            # Some optimizers never change versions. Only parameters that were seen to be updated count.
            elif self._carries and parameter in self._updated and not _has_gradient(parameter):
                self._warn(
                    "discarded",
                    f"the average of {name}'s gradient was cleared before any step() applied it, but its residual "
                    "still enters later averages; run backward passes whose gradients are not used in "
                    "handle.discard([...]) with the parameters concerned",
                )
        elif passed is not None and passed != version and not _has_gradient(parameter):
            self._warn(
                "not averaged",
                f"the gradient of {name} was applied and cleared without being averaged, so workers diverge; run "
                "the forward pass through the DistributedDataParallel model (not ddp.module), and the last backward "
                "pass of each step outside no_sync()",
            )
        self._passed[parameter] = version

    def _warn(self, kind: str, line: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"spardl: {line}.", stacklevel=4)

    def close(self) -> None:
        """Removes all hooks."""
        for hook in self._hooks:
            hook.remove()
        self._nodes = []


def check_no_gradients(parameters: Iterable[nn.Parameter], awaited: Iterable[Named] = ()) -> None:
    """Checks that all gradients are zero or ``None`` before an optimizer step without new averages.

    Such a step must not change the weights.

    Args:
        parameters: Parameters of the optimizer.
        awaited: Parameters without whose gradients DDP averages nothing.

    Raises:
        ConfigError: If a gradient is not zero.
    """
    if not any(_has_gradient(each) for each in parameters):
        return
    # DDP waits for all gradients of a bucket. It reports this in the next forward pass, which step() prevents.
    lacking = [name for name, each in awaited if not each.requires_grad or each.grad is None]
    unused = (
        f"; {lacking[0]} has no gradient: if it is frozen or unused, construct DistributedDataParallel with "
        "find_unused_parameters=True"
        if lacking
        else ""
    )
    raise ConfigError(
        "step() would apply gradients that were not averaged since the last step(); before each step(), call "
        "zero_grad(), run a forward pass through the model of this handle (not ddp.module) and a backward pass "
        f"outside no_sync(){unused}; to train without the handle, call detach()"
    )


def is_unchanged(gradient: Tensor, before: Tensor, scale: float) -> bool:
    """Returns whether a gradient equals its earlier value, up to the loss scale that a GradScaler may have removed.

    Args:
        gradient: Current gradient, of any shape.
        before: Earlier value. For a sharded gradient, only the shard of this process, of the shard's shape.
        scale: The loss scale; 1 without a GradScaler.
    """
    # The tolerance covers the rounding of a division by the scale in half precision.
    own = local_part(gradient)
    return any(torch.allclose(own, before * each, rtol=1e-2) for each in {1.0, 1 / scale})


def warn_clipped(clip_norm: float) -> None:
    """Warns that the loop clips gradients although the handle already clips them to the norm ``clip_norm``."""
    warnings.warn(
        "spardl: clip_grad_norm_() between backward() and step() has no effect, because this handle already clips to "
        f"clip_norm={clip_norm}; delete it from the loop (with another limit, it raises an error as soon as it changes "
        "a gradient).",
        stacklevel=5,
    )


def _has_gradient(parameter: Tensor) -> bool:
    return parameter.grad is not None and bool(local_part(parameter.grad).any())


def _storage(parameter: nn.Parameter) -> int:
    return local_part(parameter.grad).untyped_storage().data_ptr() if parameter.grad is not None else 0


def _version_steps_of_unscale(device: torch.device) -> int:
    """Returns the increase of a gradient's version by ``GradScaler.unscale_``, which depends on torch's version."""
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0)
    probe = nn.Parameter(torch.zeros(1, device=device))
    probe.grad = torch.zeros_like(probe)
    before = probe.grad._version
    scaler.scale(torch.zeros((), device=device))
    scaler.unscale_(torch.optim.SGD([probe]))
    return probe.grad._version - before


# --- a handle and its optimizer


class OptimizerSteps:
    """Connects a handle with its optimizers: steps only apply averages, and averages without a step are detected.

    Args:
        method: Method of the handle.
        optimizers: Optimizers passed to the handle, if any.
        trained: Parameters whose gradients are averaged.
        averager: Function that returns the averager, or ``None`` before the first step. It must hold no strong
            reference to the handle, which owns this object.
        delayed: Whether updates are applied after ``step()`` has returned. ``.grad`` then holds each worker's own
            gradient.
        clip_norm: Largest 2-norm of each worker's own gradient, to which the handle clips; ``None`` for no limit.
        awaited: Parameters without whose gradients DDP averages nothing.
    """

    def __init__(
        self,
        method: Method,
        optimizers: Sequence[torch.optim.Optimizer],
        trained: Sequence[Named],
        averager: Callable[[], Averager | None],
        *,
        delayed: bool = False,
        clip_norm: float | None = None,
        awaited: Sequence[Named] = (),
    ) -> None:
        self._averager, self._delayed, self._clip_norm = averager, delayed, clip_norm
        self._state_replaced = False
        found = (ApplyUpdate.of(method.momentum, each, partial(self._check_step, each)) for each in optimizers)
        self._plain = [each for each in found if each is not None]
        self._guard: StepGuard | None = None
        self._watch: PassWatch | None = None
        if optimizers and (self._plain or (delayed and method.carries)):
            self._guard = StepGuard(trained, optimizers, awaited, in_place=not delayed)
        elif not delayed:
            self._watch = PassWatch(trained, carries=method.carries)
        self._marks = GradientMarks()
        # Norm of all averages of this step, if the loop has clipped them.
        self._norm: float | None = None
        self._trained = [each.parameter for each in trained]
        self._warned = False

    # --- backward passes

    def take_over(self, averager: Averager) -> None:
        """Moves the optimizer's moments, if any, to ``averager``; call this before the first gradient of a step.

        If a state of the handle was loaded since the last step, and it was saved after at least one step, its moments
        are kept instead: in checkpoints of older versions, those of the optimizer may date from before ``attach``.
        """
        if self._plain:
            gradient, carried = averager.gradient, averager.engine.gradient_state
            stale = self._state_replaced and carried.states[0][0].step > 0
            take_over(self._plain, carried, gradient.names, gradient.parameters, averager.engine.scale, stale=stale)
        self._state_replaced = False

    def ignores(self, parameters: Iterable[Tensor], *, passed: bool = False) -> bool:
        """Returns whether to ignore a backward pass because it adds to gradients that the last step already applied.

        Args:
            parameters: Parameters whose gradients the pass computes first, of any shape.
            passed: Whether the running pass has computed the gradients of all of them, also if they are zero.
        """
        return self._guard is not None and self._guard.stale(parameters, passed=passed)

    def check_ignored(self) -> None:
        """Checks an ignored backward pass when it ends.

        Raises:
            ConfigError: If only some of the gradients were cleared before the pass.
        """
        if self._guard:
            self._guard.check_stale()

    def begin(self, averager: Averager) -> None:
        """Prepares a step before its gradients are averaged.

        Undoes the last step if its averages were cleared before ``step()``, and takes over the optimizer's state.
        """
        if self._guard and self._guard.discarded() and not self._delayed:
            averager.undo.last_step()
        self.take_over(averager)

    def before_gradient(self, named: Named) -> None:
        """Must be called before a backward pass adds to a sharded gradient, because autograd does not report that."""
        if self._guard:
            self._guard.before_gradient(named)

    def averaged(self, discarded: Collection[nn.Parameter] = ()) -> None:
        """Records that new averages are ready for the optimizer to apply.

        Args:
            discarded: Parameters whose averages the training loop clears before a step applies them.

        Raises:
            ConfigError: If gradients were added to earlier averages that had not been cleared.
        """
        if self._guard:
            self._guard.averaged()
        if self._watch:
            self._watch.averaged(discarded)

    def mark(self) -> None:
        """Records the gradients at the end of a backward pass; the next step checks that they are unchanged."""
        if self._plain and not self._delayed:
            self._marks.set(self._trained)
            self._norm = None

    @property
    def updates(self) -> bool:
        """Whether ``optimizer.step()`` applies nothing but averages, and applies those of all parameters."""
        return bool(self._plain) or self._delayed

    # --- steps

    def _check_step(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        averager = self._averager()
        if averager is None:
            check_no_gradients(parameters)
            return
        check_known(parameters, averager.numbers)
        if not self._delayed:
            if self._guard:
                self._guard.check_step(optimizer, parameters)
            self._check_unchanged(averager, parameters)

    def _check_unchanged(self, averager: Averager, parameters: list[nn.Parameter]) -> None:
        """Checks that gradients equal the averages, possibly clipped by the loop to the limit of the handle.

        Raises:
            ConfigError: If gradients were changed, or touched by a call that happened to change no value.
        """
        changed = self._marks.changed(parameters, scaled=averager.scaled)
        self._marks.clear(parameters)
        if not changed:
            _check_values(averager, parameters, self._clip_norm)
        elif self._clip_norm is None:
            self._check_touched(averager, parameters, changed)
        else:
            if self._norm is None:
                # Before the gradients of the first optimizer are cleared.
                self._norm = _norm_of(average for _, average in _averages(averager, self._trained))
            _undo_clipping(averager, parameters, self._clip_norm, self._norm)
            if not self._warned:
                warn_clipped(self._clip_norm)
                self._warned = True

    def _check_touched(
        self, averager: Averager, parameters: Sequence[nn.Parameter], changed: Sequence[nn.Parameter]
    ) -> None:
        """Checks that ``changed`` gradients of ``parameters`` equal the averages, and only an optimizer touched them.

        Raises:
            ConfigError: If a gradient was changed, or touched by anything but another optimizer.
        """
        own = set(parameters)
        # Views of one DDP bucket share a version counter, which zero_grad() of another optimizer increases.
        cleared = {_storage(each) for each in self._trained if each not in own and each not in self._marks}
        for parameter, average in _averages(averager, changed):
            assert parameter.grad is not None
            if _storage(parameter) not in cleared or not is_unchanged(parameter.grad, average, averager.engine.scale):
                raise _changed_gradient(averager, parameter, None)

    def forget(self) -> None:
        """Deletes the records of all gradients, because the handle's state was replaced."""
        self._state_replaced = True
        if averager := self._averager():
            averager.undo.forget()
        self._marks.clear()
        if self._guard:
            self._guard.forget()
        if self._watch:
            self._watch.forget()

    def handle_dropped(self) -> None:
        """Removes all hooks after the handle was garbage-collected, unless delayed updates (``dear``) need them."""
        if not self._delayed:
            self.close()

    def close(self) -> None:
        """Removes all hooks, so that the optimizer works as without a handle."""
        for each in (*self._plain, self._guard, self._watch):
            if each:
                each.close()
        self._marks.clear()
        self._trained = []


def _check_values(averager: Averager, parameters: Sequence[nn.Parameter], clip_norm: float | None) -> None:
    """Checks that the entries of gradients equal the averages, up to the loss scale.

    Detects changes that do not increase version counters. Reads entries in each of the first 20 steps and in every 16th
    step after that; in all steps if parameters are sharded.

    Args:
        averager: Averager of the handle.
        parameters: Parameters that the optimizer is about to update.
        clip_norm: Largest 2-norm that the handle clips to, if any.

    Raises:
        ConfigError: If entries differ.
    """
    # torch's foreach functions, which clip_grad_norm_ uses on a GPU, change a DTensor without increasing its counter.
    sharded = any(local_part(each) is not each for each in parameters)
    if not sharded and averager.engine.steps > ALWAYS_CHECKED and averager.engine.steps % CHECK_INTERVAL != 1:
        return
    for parameter, average in _averages(averager, parameters):
        assert parameter.grad is not None
        if not is_unchanged(parameter.grad, average, averager.engine.scale):
            raise _changed_gradient(averager, parameter, clip_norm)


def _averages(averager: Averager, parameters: Iterable[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yields parameters whose gradients are not zero, with their averages."""
    for parameter in parameters:
        # DDP does not change the gradients of parameters that no worker used.
        if parameter.requires_grad and _has_gradient(parameter):
            yield parameter, averager.gradient.part(averager.numbers[parameter]).view(local_part(parameter).shape)


def _changed_gradient(averager: Averager, parameter: nn.Parameter, clip_norm: float | None) -> ConfigError:
    """Returns the error for a gradient that no longer equals its average."""
    pairs = zip(averager.gradient.names, averager.gradient.parameters, strict=True)
    name = next(name for name, each in pairs if each is parameter)
    line = f"the gradient of {name}, an averaged update, was changed between backward() and step(); "
    if clip_norm is not None:
        return ConfigError(
            f"{line}delete clip_grad_norm_() from the loop, because this handle already clips to clip_norm={clip_norm}"
        )
    return ConfigError(
        f"{line}delete clip_grad_norm_() from the loop, even if it changes no value, and pass clip_norm= to the handle "
        'instead (and scaler= if you use a GradScaler), or use recipe="published"'
    )


def _norm_of(averages: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(each.square().sum(dtype=torch.float64)) for each in averages))


def _undo_clipping(averager: Averager, parameters: Iterable[nn.Parameter], clip_norm: float, whole_norm: float) -> None:
    """Restores averages that the loop clipped with ``clip_grad_norm_`` to the limit of the handle.

    Each worker's gradient is already clipped before it becomes an update, and the update must not be clipped again.

    Args:
        averager: Averager of the handle.
        parameters: Parameters that the optimizer is about to update.
        clip_norm: Largest 2-norm that the handle clips to.
        whole_norm: 2-norm of the averages of all optimizers; the loop may have clipped them together.

    Raises:
        ConfigError: If gradients were changed in another way.
    """
    # A GradScaler has removed its scale from the gradients, but not from the averages.
    scale = averager.engine.scale
    pairs = list(_averages(averager, parameters))
    gradients = [(local_part(each.grad), average) for each, average in pairs if each.grad is not None]

    def equal(factor: float) -> bool:
        # The tolerance covers the rounding of a division by the scale in half precision.
        return all(torch.allclose(gradient, average * factor, rtol=1e-2) for gradient, average in gradients)

    if len(gradients) == len(pairs) and equal(1 / scale):
        return
    norms = (whole_norm, _norm_of(average for _, average in pairs))
    if any(equal(clip_norm / (norm + 1e-6 * scale)) for norm in norms):
        for gradient, average in gradients:
            gradient.copy_(average / scale)
        return
    raise _changed_gradient(averager, pairs[0][0], clip_norm)
