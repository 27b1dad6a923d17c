"""The steps of an optimizer that a handle was given: what they apply, and whether they apply every average."""

from __future__ import annotations

import math
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from spardl.basics.errors import ConfigError
from spardl.basics.weak import weakly
from spardl.hooks.averager import LOOKED, LOOKED_FIRST, Averager, Named
from spardl.hooks.choosing import check_known
from spardl.method.method import Method
from spardl.schedules.plain import PlainSteps

__all__ = [
    "Discarding",
    "Marks",
    "OptimizerSteps",
    "Unapplied",
    "Unaveraged",
    "after_backward",
    "discarded",
    "refuse_gradients",
    "warn_clipped",
]


# Gradients that the loop discards: backward passes of which nothing is carried over.


class Discarding:
    """The part of a handle that leaves gradients out which the loop discards.

    Args:
        parameters: that the handle averages.
        whole: whether an optimizer applies averages to all of them at once.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, whole: bool) -> None:
        self._discardable, self._whole = frozenset(parameters), whole
        self._discards: frozenset[nn.Parameter] = frozenset()

    @contextmanager
    def discard(self, parameters: Iterable[nn.Parameter] | None = None) -> Iterator[None]:
        """Lets backward passes inside leave no trace in parameters whose gradients the loop discards.

        For a loss that goes through a model which it is not to train, for example a generator's through the
        discriminator. All workers must call it alike. Such gradients are not averaged, and residuals and moments stay
        as they are; clear them (``zero_grad()``) before the model's own pass.

        Args:
            parameters: whose gradients are discarded; ``None``: all. A ``Synchronizer`` waits inside if some are given.

        Raises:
            ConfigError: if a parameter is not one of the handle's, or only some are given where ``step()`` applies
                averages to all (``optimizer=``).
        """
        before = self._discards
        self._discards = discarded(parameters, self._discardable, whole=self._whole)
        try:
            yield
        finally:
            self._discards = before

    @property
    def _discards_all(self) -> bool:
        return self._discards >= self._discardable

    def _shelve(self, averager: Averager) -> None:
        """Leaves the parameters out of the step that begins."""
        if self._discards:
            pairs = enumerate(averager.gradient.parameters)
            averager.shelve([number for number, each in pairs if each in self._discards])


def discarded(
    parameters: Iterable[nn.Parameter] | None, averaged: Set[nn.Parameter], *, whole: bool
) -> frozenset[nn.Parameter]:
    """The parameters whose gradients a loop is to discard.

    Args:
        parameters: that were given; ``None`` for all.
        averaged: those that the handle averages.
        whole: whether the optimizer applies averages to all of them at once.

    Raises:
        ConfigError: if a parameter is not one of the handle's, or only some are given where it must be all.
    """
    if parameters is None:
        return frozenset(averaged)
    chosen = frozenset([parameters] if isinstance(parameters, nn.Parameter) else parameters)
    if others := len(chosen - averaged):
        raise ConfigError(
            f"discard() was given {others} parameters that this handle does not average; give parameters of the model, "
            "for example model.discriminator.parameters()"
        )
    if whole and chosen and chosen != averaged:
        raise ConfigError(
            f"discard() was given {len(chosen)} of {len(averaged)} parameters, and with optimizer= a step applies "
            "averages to all; call discard() without parameters, or make a handle without optimizer="
        )
    return chosen


# Detects averages that no ``optimizer.step()`` applied, and steps that would apply anything else.


class Marks:
    """Remembers gradients, and later tells which of them were replaced or changed in place, without reading entries.

    A changed ``_version`` is what autograd itself takes for a change. Multiplying by 1, as ``clip_grad_norm_`` does
    below its limit, also counts as one.
    """

    def __init__(self) -> None:
        self._marks: dict[nn.Parameter, tuple[weakref.ref[Tensor], int]] = {}
        self._unscalings: int | None = None

    def set(self, parameters: Iterable[nn.Parameter]) -> None:
        """Remembers the gradients that the parameters have now, and no others."""
        self._marks = {
            each: (weakref.ref(each.grad), each.grad._version) for each in parameters if each.grad is not None
        }

    def clear(self) -> None:
        """Forgets all gradients."""
        self._marks.clear()

    def pop(self, parameter: nn.Parameter) -> bool | None:
        """Forgets a parameter's gradient, and returns whether it is unchanged; ``None`` if it was not remembered."""
        return self._same(parameter, self._marks.pop(parameter)) if parameter in self._marks else None

    def changed(self, parameters: Sequence[nn.Parameter], *, scaled: bool = False) -> list[nn.Parameter]:
        """Returns parameters whose gradients were changed and are not zero.

        Args:
            parameters: to look at; those whose gradients are not remembered are left out.
            scaled: whether a GradScaler may have taken its scale off, which is no change.
        """
        found = [each for each in parameters if each in self._marks and not self._same(each, self._marks[each])]
        if found and scaled:
            if self._unscalings is None:
                self._unscalings = _unscalings(found[0].device)
            # Gradients that DDP keeps as views of a bucket share one version.
            sharing = Counter(map(_storage, parameters))
            most = {each: self._unscalings * sharing[_storage(each)] for each in found}
            found = [each for each in found if not self._same(each, self._marks[each], most[each])]
        return [each for each in found if _is_set(each)]

    def _same(self, parameter: nn.Parameter, mark: tuple[weakref.ref[Tensor], int], most: int = 0) -> bool:
        reference, version = mark
        gradient = parameter.grad
        return gradient is not None and reference() is gradient and version <= gradient._version <= version + most


def after_backward(call: Callable[[], None]) -> Callable[[], None]:
    """Returns a function that has ``call`` called at the end of the running backward pass, after what DDP does there.

    To be called in a communication hook of DDP, which copies averages into gradients at the end of the pass.

    Args:
        call: what is called; ``torch.compile`` must not trace it.
    """
    engine = torch.autograd.Variable._execution_engine
    # DDP has not registered its own function yet when its last hook runs: ours registers another one at the end.
    later = torch.compiler.disable(lambda: engine.queue_callback(call))

    def queue() -> None:
        # DDP's join() calls hooks outside backward passes, where there is no end to wait for and no new gradient.
        with suppress(RuntimeError):
            engine.queue_callback(later)

    return queue


class Unapplied:
    """Observes what becomes of averages until the next ones.

    Args:
        named: the parameters whose gradients are averaged; each is trained.
        optimizer: whose steps apply the averages.
        in_place: whether gradients are the averages after a backward pass, instead of each worker's own.
    """

    def __init__(self, named: Sequence[Named], optimizer: torch.optim.Optimizer, *, in_place: bool) -> None:
        self._in_place, self._steps = in_place, 0
        self._due = self._told = self._applying = False
        self._added: set[nn.Parameter] = set()
        self._noted: dict[nn.Parameter, str] = {}
        self._parameters = [each.parameter for each in named]
        # Gradients that the last step applied; then those of them that were not cleared, or were, before the next pass.
        self._used = Marks()
        self._stale: dict[nn.Parameter, str] = {}
        self._cleared: set[nn.Parameter] = set()
        self._hooks = [
            optimizer.register_step_pre_hook(torch.compiler.disable(self._applies)),
            optimizer.register_step_post_hook(torch.compiler.disable(self._applied)),
        ]
        # Not of the parameters, whose own hooks would be seen by torch.compile.
        self._nodes = [get_gradient_edge(each.parameter).node for each in named]
        pairs = zip(self._nodes, named, strict=True)
        self._hooks += [node.register_prehook(weakly(self._look, each)) for node, each in pairs]

    def discarded(self) -> bool:
        """Whether averages were cleared before a step applied them; forgets them then, and warns once.

        To be called when the next gradients are there, before they are averaged.
        """
        if not self._due or self._noted:
            return False
        self._due = False
        if not self._told:
            warnings.warn(
                "spardl: averages were thrown away before the optimizer's step(), and went back to the residuals; the "
                "handle undoes the next such passes, which takes a copy of what it carries over: make a backward pass "
                "that is to change nothing (a discriminator's, while the generator learns) in handle.discard() or "
                "no_sync(), on all workers.",
                stacklevel=4,
            )
            self._told = True
        return True

    def stale(self, parameters: Iterable[Tensor]) -> bool:
        """Whether a pass adds to gradients that the last step applied: nothing can use its gradients.

        Args:
            parameters: those whose gradients come first in this pass, of any shape.
        """
        return bool(self._stale) and any(each in self._stale and _is_set(each) for each in parameters)

    def check_stale(self) -> None:
        """Accepts a pass that added to applied gradients.

        Raises:
            ConfigError: if other gradients were cleared before it.
        """
        if self._stale and self._cleared:
            self._refuse(min(self._stale.values()))

    def averaged(self) -> None:
        """There are averages, which the optimizer is to apply.

        Raises:
            ConfigError: if what was averaged before is in them again.
        """
        if self._noted:
            self._refuse(min(self._noted.values()))
        self._due = True
        self._steps += 1
        self._added.clear()
        self._stale.clear()
        self._cleared.clear()

    def _refuse(self, name: str) -> None:
        raise ConfigError(
            f"the gradient of {name} was averaged together with what had been averaged before; call "
            "optimizer.zero_grad() before the first backward pass of each step, and leave all backward passes of "
            "a step but the last to no_sync(), as well as those that are to change nothing"
        )

    def check_due(self, parameters: Sequence[nn.Parameter]) -> None:
        """Accepts a step that applies averages.

        Args:
            parameters: that have gradients.

        Raises:
            ConfigError: if there were no averages since the last one, or a backward pass added gradients to them.
        """
        if not self._due:
            if stale := [self._stale[each] for each in parameters if each in self._stale and _is_set(each)]:
                raise ConfigError(
                    f"step() would apply the gradient of {min(stale)} to which a backward pass was added after the "
                    "last step() applied it; call optimizer.zero_grad() before the first backward pass of each step"
                )
            refuse_gradients(parameters)
        added = [self._noted[each] for each in parameters if each in self._noted and _is_set(each)]
        if added:
            raise ConfigError(
                f"a backward pass in no_sync() added to the gradient of {min(added)} after it was averaged, and "
                "workers would drift apart; leave all backward passes of a step but the last to no_sync(), and average "
                "in the last one"
            )

    def forget(self) -> None:
        """What was carried over was replaced."""
        self._due = False
        self._added.clear()
        self._noted.clear()

    def _applies(self, *_: object) -> None:
        self._applying, self._due = self._due, False

    def _applied(self, *_: object) -> None:
        if self._applying:
            self._used.set(self._parameters)
            self._stale.clear()
            self._cleared.clear()
        self._applying = False

    def _look(self, named: Named, *_: object) -> None:
        """Is called before a backward pass adds to a gradient; looks at the first one since there were averages."""
        name, parameter = named
        before, first = parameter.grad, parameter not in self._added
        self._added.add(parameter)
        self._look_applied(named)
        # Most loops have none then. Where there are zeros, to look costs time.
        looks = self._due or (self._in_place and self._steps % LOOKED == 1 and parameter not in self._stale)
        if first and looks and before is not None and before.any():
            self._noted[parameter] = name
        elif parameter in self._noted and (before is None or not before.any()):
            del self._noted[parameter]  # it was cleared after that pass

    def _look_applied(self, named: Named) -> None:
        """Notes whether the gradient that the last step applied was cleared since."""
        name, parameter = named
        if parameter in self._stale:
            # Zeros may be what was added, too.
            if not _is_set(parameter):
                del self._stale[parameter]
        elif (same := self._used.pop(parameter)) is not None:
            if same:
                self._stale[parameter] = name
            else:
                self._cleared.add(parameter)

    def close(self) -> None:
        """Looks no more."""
        for hook in self._hooks:
            hook.remove()
        self._nodes = []


class Unaveraged:
    """Observes a handle that was not given the optimizer: warns of what is lost or wrong without an error.

    Nothing tells this which optimizer there is. It compares versions of weights, which an update in place changes.

    Args:
        named: the parameters whose gradients are averaged; each is trained.
        carries: whether gradients last in a residual.
    """

    def __init__(self, named: Sequence[Named], *, carries: bool) -> None:
        self._carries = carries
        self._passed: dict[nn.Parameter, int] = {}
        self._averaged: dict[nn.Parameter, int] = {}
        self._updated: set[nn.Parameter] = set()
        self._told: set[str] = set()
        self._nodes = [get_gradient_edge(each.parameter).node for each in named]
        pairs = zip(self._nodes, named, strict=True)
        self._hooks = [node.register_prehook(weakly(self._look, each)) for node, each in pairs]

    def averaged(self, discarded: Collection[nn.Parameter]) -> None:
        """All gradients of the backward pass, and of those before it in no_sync(), are averages now.

        Args:
            discarded: parameters whose averages the loop is to discard.
        """
        self._averaged = {each: version for each, version in self._passed.items() if each not in discarded}
        self._passed = {}

    def forget(self) -> None:
        """The gradients of the last pass are not to be looked at."""
        self._passed, self._averaged = {}, {}

    def _look(self, named: Named, *_: object) -> None:
        """Is called before a backward pass adds to a gradient."""
        name, parameter = named
        version = parameter._version
        averaged, passed = self._averaged.pop(parameter, None), self._passed.get(parameter)
        if averaged is not None:
            if averaged != version:
                self._updated.add(parameter)
            elif self._carries and parameter in self._updated and not _is_set(parameter):
                # Of optimizers that change no version nothing is known.
                self._warn(
                    "discarded",
                    f"the average of {name}'s gradient was cleared before any step() applied it, and what the method "
                    "keeps of that gradient comes with later averages; make the backward pass in "
                    "handle.discard([...]), with the parameters whose gradients are not used",
                )
        elif passed is not None and passed != version and not _is_set(parameter):
            self._warn(
                "not averaged",
                f"the gradient of {name} was applied and cleared without being averaged, and workers drift apart; run "
                "the forward pass through the DistributedDataParallel model (not ddp.module), and the last backward "
                "pass of each step outside no_sync()",
            )
        self._passed[parameter] = version

    def _warn(self, kind: str, line: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            warnings.warn(f"spardl: {line}.", stacklevel=4)

    def close(self) -> None:
        """Looks no more."""
        for hook in self._hooks:
            hook.remove()
        self._nodes = []


def refuse_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Accepts a step before which nothing was averaged, if there is nothing to apply.

    Args:
        parameters: of the optimizer.

    Raises:
        ConfigError: if one has a gradient that is not zero.
    """
    if any(_is_set(each) for each in parameters):
        raise ConfigError(
            "step() would apply gradients that were not averaged since the last step(); before each step() call "
            "zero_grad(), then run a forward pass through the model that the handle was made for (not ddp.module) and "
            "a backward pass outside no_sync(); detach() the handle before the model is trained without it"
        )


def warn_clipped(clip_norm: float) -> None:
    """Warns of a loop that limits gradients, where the handle does.

    Args:
        clip_norm: limit of the handle.
    """
    warnings.warn(
        f"spardl: the loop clips gradients between backward() and step(), which has no effect: this handle limits them "
        f"to clip_norm={clip_norm}; delete clip_grad_norm_() from the loop, since with another limit it is an error in "
        "the first step in which it changes anything.",
        stacklevel=5,
    )


def _is_set(parameter: Tensor) -> bool:
    return parameter.grad is not None and bool(parameter.grad.any())


def _storage(parameter: nn.Parameter) -> int:
    return parameter.grad.untyped_storage().data_ptr() if parameter.grad is not None else 0


def _unscalings(device: torch.device) -> int:
    """Returns by how much ``GradScaler.unscale_`` increases a gradient's version on a device: this depends on torch."""
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0)
    probe = nn.Parameter(torch.zeros(1, device=device))
    probe.grad = torch.zeros_like(probe)
    before = probe.grad._version
    scaler.scale(torch.zeros((), device=device))
    scaler.unscale_(torch.optim.SGD([probe]))
    return probe.grad._version - before


class OptimizerSteps:
    """Lets an optimizer only apply averages, where its state was moved; sees to it that none is thrown away or missing.

    Args:
        method: of the handle.
        optimizer: that it was given, if it was.
        trained: the parameters whose gradients are averaged.
        averager: gives what averages them, once there is one; must not keep the handle, which keeps this.
        delayed: whether steps are made later than the loop calls them; gradients are each worker's own then.
        clip_norm: largest norm of each worker's own gradient, which the handle limits itself.
    """

    def __init__(
        self,
        method: Method,
        optimizer: torch.optim.Optimizer | None,
        trained: Sequence[Named],
        averager: Callable[[], Averager | None],
        *,
        delayed: bool = False,
        clip_norm: float | None = None,
    ) -> None:
        self._averager, self._delayed, self._clip_norm = averager, delayed, clip_norm
        self._replaced = False
        self._plain = PlainSteps.of(method.momentum, optimizer, self._look)
        self._unapplied: Unapplied | None = None
        self._unaveraged: Unaveraged | None = None
        if optimizer is not None and (self._plain or (delayed and method.carries)):
            self._unapplied = Unapplied(trained, optimizer, in_place=not delayed)
        elif not delayed:
            self._unaveraged = Unaveraged(trained, carries=method.carries)
        self._marks = Marks()
        self._trained = [each.parameter for each in trained]
        self._told = False

    # --- a backward pass

    def take_over(self, averager: Averager) -> None:
        """Moves the optimizer's state, if it has any, to ``averager``; call before each step's first gradient.

        A handle's state that was loaded since the last step, and has steps, takes precedence: older versions left the
        moments of a training before ``attach`` in the optimizer's checkpoint.
        """
        if self._plain:
            gradient, carried = averager.gradient, averager.engine.carried
            stale = self._replaced and carried.states[0][0].step > 0
            scale = averager.engine.scale
            self._plain.take_over(carried, gradient.names, gradient.parameters, scale, stale=stale)
        self._replaced = False

    def ignores(self, parameters: Iterable[Tensor]) -> bool:
        """Whether nothing can use the gradients of the backward pass, and it must not count.

        Args:
            parameters: those whose gradients come first in it, of any shape.
        """
        return self._unapplied is not None and self._unapplied.stale(parameters)

    def check_ignored(self) -> None:
        """Accepts a backward pass that is ignored, at its end.

        Raises:
            ConfigError: if a part of the gradients was cleared before it, and the rest was not.
        """
        if self._unapplied:
            self._unapplied.check_stale()

    def begin(self, averager: Averager) -> None:
        """Is called before gradients are averaged.

        Undoes the last averages if they were cleared before a step, and takes over state of the optimizer.
        """
        if self._unapplied and self._unapplied.discarded() and not self._delayed:
            averager.undoing.undo()
        self.take_over(averager)

    def averaged(self, discarded: Collection[nn.Parameter] = ()) -> None:
        """There are averages, which the optimizer is to apply.

        Args:
            discarded: parameters whose averages the loop is to discard.

        Raises:
            ConfigError: if what was averaged before is in them again.
        """
        if self._unapplied:
            self._unapplied.averaged()
        if self._unaveraged:
            self._unaveraged.averaged(discarded)

    def mark(self) -> None:
        """The backward pass has ended, and every gradient is what the optimizer is to apply."""
        if self._plain and not self._delayed:
            self._marks.set(self._trained)

    @property
    def updates(self) -> bool:
        """Whether steps of the optimizer apply averages to all parameters."""
        return self._plain is not None or self._delayed

    # --- a step

    def _look(self, parameters: list[nn.Parameter]) -> None:
        averager = self._averager()
        if averager is None:
            refuse_gradients(parameters)
            return
        check_known(parameters, averager.known)
        if not self._delayed:
            if self._unapplied:
                self._unapplied.check_due(parameters)
            self._check_unchanged(averager, parameters)

    def _check_unchanged(self, averager: Averager, parameters: list[nn.Parameter]) -> None:
        """Accepts gradients that are the averages, and those that the loop limited as the handle does already.

        Raises:
            ConfigError: if they were changed, even by a call that found nothing to change in this step.
        """
        changed = self._marks.changed(parameters, scaled=averager.scaled)
        self._marks.clear()
        if not changed:
            _check_values(averager, parameters, self._clip_norm)
        elif self._clip_norm is None:
            raise _changed(averager, changed[0], None)
        else:
            _take_limit_off(averager, parameters, self._clip_norm)
            if not self._told:
                warn_clipped(self._clip_norm)
                self._told = True

    def forget(self) -> None:
        """What was carried over was replaced."""
        self._replaced = True
        if averager := self._averager():
            averager.undoing.forget()
        self._marks.clear()
        if self._unapplied:
            self._unapplied.forget()
        if self._unaveraged:
            self._unaveraged.forget()

    def left(self) -> None:
        """The handle was dropped: as ``close``, but for steps that are made later, which the model still waits for."""
        if not self._delayed:
            self.close()

    def close(self) -> None:
        """The optimizer's steps are its own again."""
        for each in (self._plain, self._unapplied, self._unaveraged):
            if each:
                each.close()
        self._marks.clear()
        self._trained = []


def _check_values(averager: Averager, parameters: Iterable[nn.Parameter], clip_norm: float | None) -> None:
    """Accepts gradients that are the averages still; a scaler may have taken its scale off.

    Reads entries in each of the first steps, then in every ``LOOKED``-th one.

    Args:
        averager: that has the averages.
        parameters: that an optimizer is about to update.
        clip_norm: limit of this handle, if it has one.

    Raises:
        ConfigError: if they are others.
    """
    if averager.engine.steps > LOOKED_FIRST and averager.engine.steps % LOOKED != 1:
        return
    for parameter, average in _averages(averager, parameters):
        assert parameter.grad is not None
        if not averager.is_still(parameter.grad, average):
            raise _changed(averager, parameter, clip_norm)


def _averages(averager: Averager, parameters: Iterable[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Parameters whose gradients are not zero, and their averages."""
    numbers = {parameter: number for number, parameter in enumerate(averager.gradient.parameters)}
    for parameter in parameters:
        # Where nobody used it, DDP leaves it as it was.
        if parameter.requires_grad and parameter.grad is not None and parameter.grad.any():
            yield parameter, averager.gradient.part(numbers[parameter]).view(parameter.shape)


def _changed(averager: Averager, parameter: nn.Parameter, clip_norm: float | None) -> ConfigError:
    """Returns the error for a gradient that is not the average any more.

    Args:
        averager: that has the average.
        parameter: whose gradient it is.
        clip_norm: limit of this handle, if it has one.
    """
    pairs = zip(averager.gradient.names, averager.gradient.parameters, strict=True)
    name = next(name for name, each in pairs if each is parameter)
    line = f"the gradient of {name} was changed between backward() and step(), and is an update by then; "
    if clip_norm is not None:
        return ConfigError(
            f"{line}this handle limits gradients to clip_norm={clip_norm} already: delete clip_grad_norm_() from "
            "the loop"
        )
    return ConfigError(
        f"{line}delete clip_grad_norm_() from the loop and give this handle clip_norm= in place of it (even a call "
        'that changes no value counts), scaler= with a GradScaler, or recipe="published"'
    )


def _take_limit_off(averager: Averager, parameters: Iterable[nn.Parameter], clip_norm: float) -> None:
    """Restores averages that the loop limited with ``clip_grad_norm_``, if to the limit of this handle.

    Args:
        averager: that has the averages.
        parameters: that an optimizer is about to update.
        clip_norm: limit of this handle.

    Raises:
        ConfigError: if they were changed in another way.
    """
    pairs = list(_averages(averager, parameters))
    if all(parameter.grad is not None and averager.is_still(parameter.grad, each) for parameter, each in pairs):
        return
    norm = math.sqrt(sum(float(each.square().sum(dtype=torch.float64)) for _, each in pairs))
    for multiple in (1.0, 1 / averager.engine.scale):
        limited = multiple * clip_norm / (norm * multiple + 1e-6)
        if all(torch.allclose(each.grad, average * limited, rtol=1e-2) for each, average in pairs):  # type: ignore[arg-type]
            for parameter, average in pairs:
                parameter.grad.copy_(average * multiple)  # type: ignore[union-attr]
            return
    raise _changed(averager, pairs[0][0], clip_norm)
