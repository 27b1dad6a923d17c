"""Local training with outer steps: workers train independently, and periodically average their progress.

The trainer does the same with :class:`OuterSteps`, which also works with simulated workers and names the sources.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from spardl.basics.errors import ConfigError
from spardl.basics.weakrefs import on_finalize, weak_method
from spardl.communicators.steps.transfer import all_gather
from spardl.hooks.averager import Averager, Named, SideGroup
from spardl.hooks.choosing import choose_method, choose_schedule, options_of
from spardl.hooks.handle import Handle
from spardl.hooks.synchronizer import check_still_frozen, check_still_trained, trained_and_frozen
from spardl.method.method import Method
from spardl.method.moving import Optimizers, double_momentum_warning, optimizers_of, resolve_momentum, trained_by
from spardl.method.names import MethodName
from spardl.method.provenance import check_whole
from spardl.method.registry import check_weights
from spardl.protocol.programs import Program, Worker, clone_data, whole_team
from spardl.schedules import OuterSteps, Schedule, Training
from spardl.schedules.apply_update import unwrap
from spardl.schedules.fusion import by_share
from spardl.schedules.gradient_state import ResidualSize, mean_size
from spardl.schedules.outer import FragmentSchedule, mix
from spardl.vector.flat import CopiedGradient, Layer, layers_of

__all__ = ["Fragment", "LayerRange", "Outer", "check_same_fragment", "split_layers"]


# --- fragments: parts of a model, each averaged by its own averager


class LayerRange(NamedTuple):
    """Consecutive parameters of a model.

    Attributes:
        named: Parameters and their names, in the order in which the model uses them.
        places: Positions of these parameters in the list of all parameters in reverse order (that of the backward
            pass).
    """

    named: Sequence[Named]
    places: range


def split_layers(named: Sequence[Named], count: int) -> list[LayerRange]:
    """Splits a model into ranges of consecutive layers with nearly equal numbers of entries.

    Args:
        named: All parameters, in the order in which the model uses them. If no name contains a module, each parameter
            counts as a layer.
        count: Number of ranges.

    Raises:
        ConfigError: If there are fewer layers than ranges.
    """
    layers = list(_layers(named))
    found = []
    for first, stop in by_share([layer.entries for layer in layers], count):
        begin, end = layers[first].tensors[0], layers[stop - 1].tensors[1]
        found.append(LayerRange(named[begin:end], range(len(named) - end, len(named) - begin)))
    return found


def _layers(named: Sequence[Named]) -> Iterator[Layer]:
    names, parameters = [pair.name for pair in named], [pair.parameter for pair in named]
    if any("." in name for name in names):
        return layers_of(names, parameters)
    return (Layer(name, (place, place + 1), each.numel()) for place, (name, each) in enumerate(named))


def check_same_fragment(worker: Worker, number: int, count: int, device: torch.device) -> Program[None]:
    """Program (sequence of messages) of one worker: checks that all workers are about to send the same fragment.

    Args:
        worker: Worker that runs the program.
        number: Number of the fragment.
        count: Number of fragments.
        device: Device of the messages.

    Raises:
        ConfigError: On all workers, if they are about to send different fragments.
    """
    ones = [1] * worker.size
    item = torch.tensor([number], device=device)
    gathered: list[Tensor] = yield from all_gather(whole_team(worker), item, ones, ones)
    found = [int(each) for each in gathered]
    other = next((rank for rank, each in enumerate(found) if each != found[0]), None)
    if other is not None:
        raise ConfigError(
            f"rank {other} sends fragment {found[other] + 1} of {count}, but rank 0 sends fragment {found[0] + 1}, so "
            "they have made different numbers of steps; give all workers the same number of batches, and call "
            "exchange() after the same step on all of them"
        )


class Fragment:
    """A range of a model's layers that is averaged independently of the rest.

    Args:
        part: Parameters of the fragment, with names and positions.
        method: Method that averages them.
        schedule: Schedule that forms groups inside the fragment.
        cluster: Cluster that connects the workers.
        given: Further settings that must be equal on all workers, by name.
        anchors: Global weights of all parameters of the model, of the parameters' shapes, by position.

    Attributes:
        places: Positions of its parameters among all parameters in reverse order, as in ``LayerRange``.
        averager: Averager of the differences of its weights.

    Raises:
        ConfigError: If the method does not support the number of workers.
    """

    def __init__(
        self,
        part: LayerRange,
        method: Method,
        schedule: Schedule,
        cluster: SideGroup,
        given: Mapping[str, Any],
        anchors: Sequence[Tensor],
    ) -> None:
        self.places = part.places
        gradient = CopiedGradient(part.named)
        self._parameters = gradient.parameters
        training = Training(None, gradient, None, weights=[anchors[place] for place in part.places])
        self.averager = Averager(method, schedule, training, cluster, given)

    def send(self, differences: Iterable[Tensor]) -> None:
        """Starts to average weight differences, and returns without waiting for the averages.

        Args:
            differences: Weight difference of each parameter, of its shape, in the order of ``places``.

        Raises:
            ConfigError: On all workers, the first time, if their settings differ.
            PeerError: If, in the first call, another worker is lost or does not answer in time.
        """
        for number, difference in enumerate(differences):
            self.averager.put(number, difference)

    def averages(self) -> Iterator[Tensor]:
        """Yields the averaged difference of each parameter, of its shape, in the order of ``places``."""
        for number, parameter in enumerate(self._parameters):
            average = torch.empty_like(parameter)
            self.averager.gradient.take(number, average)
            yield average


# --- the handle


# Number of exchanges after which the momentum factor is halfway from 0.5 to 1, and the outer learning rate where a
# residual replaces momentum. Both were tuned in short and long trainings (docs/training-loop.md).
_MOMENTUM_HALF_LIFE, _LR_WITH_RESIDUAL = 12, 1.5


class _NotAnOptimizer:
    """Makes a GradScaler reject the object; a GradScaler accepts everything with ``step()`` as an optimizer."""

    @property
    def param_groups(self) -> NoReturn:
        """Raises an error: an ``Outer`` is not an optimizer, so pass the local optimizer to a ``GradScaler``.

        A scaler skips a step if gradients overflow on this worker, whereas all workers must count the same steps.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "an Outer is not an optimizer, so scaler.step(outer) and scaler.unscale_(outer) cannot work; call "
            "scaler.step(optimizer) and then outer.count(), also after a step that the scaler skipped"
        )


class Anchors:
    """The global weights (anchors), equal on all workers, and the outer SGD that updates them.

    Args:
        outer: Settings of the outer SGD.
        method: Method that averages the differences.
        parameters: Trained parameters of this worker, in the order of the backward pass.

    Attributes:
        weights: One tensor of global weights per parameter, of its shape.
        optimizer: Outer SGD, which updates ``weights``.
        momentum: Momentum factor of the outer SGD; if it rises during training, its final value.
        rises: Whether the momentum factor rises with the number of exchanges.
    """

    def __init__(self, outer: OuterSteps, method: Method, parameters: Sequence[nn.Parameter]) -> None:
        self.weights = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
        self.optimizer = outer.rule(self.weights, method)
        self.momentum: float = self.optimizer.defaults["momentum"]
        self.rises = outer.momentum is None and self.momentum > 0
        self._exchanges = [0] * outer.fragments

    def step(self, number: int, fragment: Fragment) -> None:
        """Applies the averaged differences of a fragment.

        Args:
            number: Number of the fragment.
            fragment: Fragment whose averages have arrived.
        """
        anchors = [self.weights[place] for place in fragment.places]
        for anchor, average in zip(anchors, fragment.averages(), strict=True):
            anchor.grad = average
        if self.rises:
            self.optimizer.param_groups[0]["momentum"] = _momentum_after(self._exchanges[number], self.momentum)
        self._exchanges[number] += 1
        self.optimizer.step()
        # SGD skips parameters without a gradient, that is, those of other fragments.
        for anchor in anchors:
            anchor.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the global weights, the momentum of the outer SGD, and the number of exchanges of each fragment."""
        return {
            "exchanges": list(self._exchanges),
            "anchors": [anchor.detach().clone() for anchor in self.weights],
            "rule": clone_data(self.optimizer.state_dict()["state"]),
        }

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Restores ``values`` from ``state_dict``, but not the learning rate and momentum factor of the outer SGD."""
        # States without this count were saved when momentum was constant.
        self._exchanges = list(values.get("exchanges", [_MOMENTUM_HALF_LIFE * 100] * len(self._exchanges)))
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": clone_data(values["rule"])})
        with torch.no_grad():
            for anchor, saved in zip(self.weights, values["anchors"], strict=True):
                anchor.copy_(saved)


class Outer(_NotAnOptimizer, Handle):
    """Local training: ``step()`` runs the local optimizer, and averages the weight changes every ``every`` steps.

    It replaces ``optimizer.step()``::

        outer = spardl.Outer(model.named_parameters(), optimizer, "spardl", every=30, density=0.01)
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss_function(model(inputs), targets).backward()
            outer.step()

    Do not wrap the model in DDP, except inside a node if ``group`` connects nodes. The constructor copies the weights
    of rank 0 to all workers, so load a checkpoint first. By default, weights are equal after each exchange; buffers and
    optimizer states stay local. With ``fragments``, ``delay`` and ``mixing``, parts of the model are sent in turn while
    local steps continue, as in Streaming DiLoCo; call ``exchange()`` after the last step. With a ``GradScaler``, call
    ``scaler.step(optimizer)`` and ``outer.count()`` instead of ``outer.step()``. Statistics count exchanges as steps.

    Args:
        parameters: ``model.named_parameters()`` or ``model.parameters()``.
        optimizer: Optimizer of these parameters, or several (``[muon, adamw]``), which each worker steps locally.
        method: Name of a method (see ``spardl.method_names()``), or a :class:`Method`.
        every: Number of steps from one exchange to the next.
        lr: Learning rate (a factor) of the outer SGD; 1 without momentum averages weights (local SGD). ``None`` means
            0.7, or 1.5 if ``momentum=None`` resolves to 0 and exchanges are neither delayed nor mixed.
        momentum: Nesterov momentum factor of the outer SGD; ``None`` means 0 for methods with a residual, otherwise 0.5
            rising to 0.9 in 49 exchanges. DiLoCo's ``lr=0.7, momentum=0.9`` needs more than a few dozen exchanges.
        fragments: Number of ranges of layers, of nearly equal size, that are exchanged in turn, each once in ``every``
            steps.
        delay: Number of local steps during which a fragment is sent; with 0, workers wait for its averages.
        mixing: Share of the averaged weights in a worker's new weights; the rest comes from its own weights.
        group: Process group; ``None`` for the default group.
        bucket_mb: Largest size, in megabytes (2^20 bytes), of weight differences that are averaged together.
        timeout: Seconds after which a worker that does not answer counts as lost.
        **options: Options of the method, for example ``density=0.01``; see :class:`Recipe`.

    Attributes:
        method: Method that averages the differences.
        momentum: Momentum factor of the outer SGD; its final value if it rises.

    Raises:
        ConfigError: If there are no parameters or fewer layers than fragments, a value is out of range, the method or
            an option is unknown or does not support the number of workers, or the method has its own momentum.

    Example:
        >>> model = nn.Linear(100, 10)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> outer = spardl.Outer(model.named_parameters(), optimizer, "none", every=2, lr=1.0, momentum=0.0)
        >>> for _ in range(4):
        ...     optimizer.zero_grad()
        ...     model(torch.randn(5, 100)).square().mean().backward()
        ...     outer.step()
        >>> outer.stats().steps
        2
        >>> outer.close()
    """

    _cluster: SideGroup

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        method: MethodName | str | Method = "spardl",
        *,
        every: int = 30,
        lr: float | None = None,
        momentum: float | None = None,
        fragments: int = 1,
        delay: int = 0,
        mixing: float = 1.0,
        group: Any = None,
        bucket_mb: float | None = None,
        timeout: float = 1800.0,
        **options: Any,
    ) -> None:
        outer = OuterSteps(every, 0.7 if lr is None else lr, momentum, fragments, delay, mixing)
        self._named, self._frozen = trained_and_frozen(parameters)
        optimizers = _checked_optimizers(optimizer, {pair.parameter for pair in self._named})
        made = resolve_momentum(choose_method(method, options), None)
        outer.check(made, clips=False)
        no_momentum = momentum is None and made.residual.remembers
        if lr is None and no_momentum and not delay and mixing == 1:
            outer = replace(outer, lr=_LR_WITH_RESIDUAL)
        parts = split_layers(self._named, fragments)
        chosen = choose_schedule("wfbp", bucket_mb)
        check_weights(made.compressor, self._named)
        # In the order of the backward pass, to which the places of fragments refer.
        self._parameters = [pair.parameter for pair in reversed(self._named)]
        super().__init__(made, SideGroup(group, self._parameters[0].device, timeout), self._parameters)
        self._optimizers, self._outer, self._since = optimizers, outer, 0
        self._turns = FragmentSchedule(every, fragments)
        self._anchors = Anchors(outer, made, self._parameters)
        self.momentum: float = self._anchors.momentum
        given = {
            "handle": "Outer",
            **asdict(outer),
            "momentum": momentum if self._anchors.rises else self.momentum,
            **options_of(chosen),
        }
        self._fragments = [Fragment(part, made, chosen, self._cluster, given, self._anchors.weights) for part in parts]
        _warn_of_misuse(self._parameters, group, double_momentum_warning(made, self._anchors.optimizer))
        _broadcast_weights(self._parameters, self._anchors.weights, group)
        self._begun = self._closed = False
        # Steps of the optimizer that count() has not counted.
        self._uncounted = 0
        self._hooks = _before_steps(optimizers, weak_method(self._before_step))
        on_finalize(self, _remove, self._hooks)

    def _before_step(self, number: int, *_: object) -> None:
        """Runs before each step of optimizer ``number``, called by ``step()`` or by the loop."""
        self._check_parameters()
        self._begin()
        self._uncounted += number == 0  # all optimizers together make one step
        if number == 0 and self._uncounted == self._outer.every + 1:
            warnings.warn(
                f"spardl: optimizer.step() was called {self._uncounted} times without Outer, which has sent nothing; "
                "call outer.step() instead, or outer.count() after each optimizer.step().",
                stacklevel=4,
            )

    def _begin(self) -> None:
        if not self._begun:
            _check_loaded(self._optimizers, self._parameters, self._anchors.weights)
            self._begun = True

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this Outer is closed; create a new one to continue")

    def _check_parameters(self) -> None:
        check_still_frozen(self._frozen)
        check_still_trained(self._named)
        for averager in self._averagers:
            averager.check_parameters()

    @property
    def _averagers(self) -> list[Averager]:
        return [fragment.averager for fragment in self._fragments]

    @property
    def since(self) -> int:
        """Number of steps since the last exchange of any fragment, or since the beginning."""
        return self._since

    def step(self) -> None:
        """Runs a step of the local optimizer, and exchanges fragments that are due.

        Raises:
            ConfigError: On all workers, if their settings differ in the first exchange or if they send different
                fragments later. On this worker, if weights were changed before the first step, if a parameter was
                frozen or unfrozen, or if this object is closed.
            PeerError: If another worker is lost or does not answer in time.
        """
        self._check_open()
        for each in self._optimizers:
            each.step()
        self.count()

    def count(self) -> None:
        """Counts an optimizer step that the loop itself has run, and exchanges fragments that are due.

        Raises:
            ConfigError: If ``step`` would raise it.
            PeerError: If another worker is lost or does not answer in time.
        """
        self._check_open()
        self._check_parameters()
        self._begun, self._uncounted = True, 0
        self._since += 1
        due = self._turns.step()
        for number in due.apply:
            self._apply(number)
        for number in due.send:
            self._send(number, self._outer.delay)

    @torch.no_grad()
    def exchange(self) -> None:
        """Averages the weight changes since the last exchange; all workers then have equal trained parameters.

        Also waits for fragments that are being sent.

        Raises:
            ConfigError: If ``step`` would raise it.
            PeerError: If another worker is lost or does not answer in time.
        """
        self._check_open()
        self._begin()
        for number in list(self._turns.in_flight):
            self._apply(number)
        for number in self._turns.changed or range(len(self._fragments)):
            self._send(number, 0)
        # Local weights differ from the anchors in fragments that were mixed or have not been sent.
        for parameter, anchor in zip(self._parameters, self._anchors.weights, strict=True):
            parameter.copy_(anchor)
        self._turns, self._since = FragmentSchedule(self._outer.every, len(self._fragments)), 0

    @torch.no_grad()
    def _send(self, number: int, delay: int) -> None:
        """Sends a fragment's changes, whose average is applied after ``delay`` steps."""
        places = self._fragments[number].places
        if len(self._fragments) > 1:
            program = check_same_fragment(self._worker, number, len(self._fragments), self._cluster.device)
            # Does not wait: if fragments differ, the messages sent afterwards fail.
            self._cluster.enqueue([program], counted=False).release(0)
        self._fragments[number].send(self._anchors.weights[place] - self._parameters[place] for place in places)
        self._turns.send(number, delay)  # also without a delay: it restarts the fragment's interval
        self._since = 0
        if not delay:
            self._apply(number)

    def _apply(self, number: int) -> None:
        """Waits for a fragment, and mixes its averaged weights into those of this worker."""
        self._outer_step(number)
        # Not in _outer_step(), which state_dict() may call earlier: all workers must report after the same step.
        self._fragments[number].averager.report_refusals("; all workers continue from the weights of the last exchange")
        self._turns.apply(number)
        for place in self._fragments[number].places:
            mix(self._parameters[place], self._anchors.weights[place], self._outer.mixing)

    def _outer_step(self, number: int) -> None:
        """Applies the averaged changes of a fragment to its anchors, unless that is already done."""
        fragment = self._fragments[number]
        if fragment.averager.receive():
            self._meter.step()
            self._anchors.step(number, fragment)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of this worker, including its weights; each rank saves its own.

        Waits for fragments that are being sent; their averages are applied after the same step as without this call.

        Raises:
            PeerError: If another worker is lost or does not answer in time.
        """
        for number in self._turns.in_flight:
            self._outer_step(number)
        first, *others = (fragment.averager.state_dict() for fragment in self._fragments)
        return {
            **first,
            "outer": {
                "since": self._since,
                "left": list(self._turns.remaining),
                "aloft": dict(self._turns.in_flight),
                "fragments": others,
                "weights": [parameter.detach().clone() for parameter in self._parameters],
                **self._anchors.state_dict(),
            },
        }

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Restores the state that ``state_dict`` returned on the same rank and world size.

        The weights are part of the state; load the state of the local optimizer separately. The outer learning rate and
        momentum keep their current settings.

        Args:
            values: Saved state.

        Raises:
            ConfigError: If the state belongs to another rank, world size, method, model, ``fragments`` or
                ``bucket_mb``, or is incomplete; nothing is changed then.
            PeerError: If a fragment is being sent and another worker is lost.
        """
        own = _check_own(values, [parameter.shape for parameter in self._parameters], self._fragments)
        states = [{name: value for name, value in values.items() if name != "outer"}, *own["fragments"]]
        pairs = list(zip(self._averagers, states, strict=True))
        # All are checked before the first is loaded, so that an error leaves everything unchanged.
        for averager, state in pairs:
            averager.check_state(state)
        for averager, state in pairs:
            averager.receive()  # ends a step in flight, whose averages the state replaces
            averager.load_state_dict(state)
        self._since = own["since"]
        # Older states of an unfragmented model lack this item, and ``every`` may have changed.
        whole = [max(1, self._outer.every - own["since"])]
        self._turns.remaining = list(own["left"]) if own["fragments"] else whole
        self._turns.in_flight = dict(own["aloft"])
        self._anchors.load_state_dict(own)
        self._begun = True
        with torch.no_grad():
            for parameter, saved in zip(self._parameters, own["weights"], strict=True):
                parameter.copy_(saved)

    @property
    def _nbytes(self) -> float:
        return sum(parameter.nbytes for parameter in self._parameters) / len(self._fragments)

    @property
    def _refused(self) -> int:
        return sum(averager.refused for averager in self._averagers)

    @property
    def _waiting(self) -> ResidualSize | None:
        return mean_size(averager.engine.residual_size() for averager in self._averagers)

    def close(self) -> None:
        """Releases the communication resources; the optimizer then works as without this object."""
        self._closed = True
        _remove(self._hooks)
        self._cluster.release()


@torch.no_grad()
def _broadcast_weights(parameters: Iterable[nn.Parameter], anchors: Iterable[nn.Parameter], group: Any) -> None:
    for parameter, anchor in zip(parameters, anchors, strict=True):
        # broadcast() sends raw memory, and strides may differ between workers.
        first = parameter.contiguous()
        dist.broadcast(first, dist.get_global_rank(group, 0) if group else 0, group)
        parameter.copy_(first)
        anchor.copy_(first)


def _check_loaded(
    optimizers: Iterable[torch.optim.Optimizer], parameters: Iterable[nn.Parameter], anchors: Iterable[nn.Parameter]
) -> None:
    """Checks, before the first step, that the weights are still those that were broadcast.

    Raises:
        ConfigError: If all weights were changed.
    """
    own = trained_by(optimizers)
    # Other parameters may have an optimizer that has already made a step.
    same = [torch.equal(*pair) for pair in zip(parameters, anchors, strict=True) if pair[0] in own]
    if not any(same):
        raise ConfigError(
            "weights were changed after this Outer was created, so its first exchange would undo the change; load "
            "weights before creating the Outer, at least on rank 0"
        )
    # A forward pass may change single parameters (max_norm of an embedding), so this is not an error.
    if not all(same):
        warnings.warn(
            f"spardl: {same.count(False)} of {len(same)} parameters were changed after this Outer was created, so its "
            "first exchange counts the change as local training; if you loaded weights, load them before creating the "
            "Outer.",
            stacklevel=4,
        )


def _check_own(values: Mapping[str, Any], shapes: list[torch.Size], fragments: list[Fragment]) -> Mapping[str, Any]:
    """Checks the part of a saved state that no averager checks, and returns it.

    Args:
        values: Saved state of the handle.
        shapes: Shapes of all parameters, by position.
        fragments: Fragments of the handle.

    Raises:
        ConfigError: If the part is missing, or an item has another type or shape.
    """
    if not isinstance(values, Mapping) or "outer" not in values:
        raise ConfigError("this is not the state of an Outer; load what its state_dict() returned")
    check_whole(values["outer"], {"since": 0, "weights": [], "anchors": [], "rule": {}}, "outer")
    own = {"left": [], "aloft": {}, "fragments": [], **values["outer"]}
    for name in ("weights", "anchors"):
        if [getattr(saved, "shape", None) for saved in own[name]] != shapes:
            raise ConfigError("this state belongs to other parameters; load it into an Outer of the same model")
    others, left, aloft, exchanges = (own.get(name, []) for name in ("fragments", "left", "aloft", "exchanges"))
    lists = all(isinstance(each, list) for each in (others, left, exchanges)) and isinstance(aloft, Mapping)
    counts = [own["since"], *left, *exchanges, *aloft.keys(), *aloft.values()] if lists else [None]
    if not all(type(count) is int and count >= 0 for count in counts):
        raise ConfigError(
            "this state is damaged: its numbers of steps and exchanges must be integers, at least 0; load what "
            "state_dict() returned"
        )
    if len(others) + 1 != len(fragments):
        raise ConfigError(
            f"this state was saved with fragments={len(others) + 1}, but this Outer has fragments={len(fragments)}; "
            "use the same number"
        )
    for name, found in (("left", left if others else fragments), ("exchanges", own.get("exchanges", fragments))):
        if len(found) != len(fragments):
            raise ConfigError(
                f"this state is damaged: {name} has {len(found)} entries for {len(fragments)} fragments; load what "
                "state_dict() returned"
            )
    rule = own["rule"]
    # The outer SGD has a momentum buffer for all parameters of a fragment or for none.
    complete = all(len(rule.keys() & set(each.places)) in (0, len(each.places)) for each in fragments)
    if not complete or not all(_is_momentum(state, place, shapes) for place, state in rule.items()):
        raise ConfigError(
            "this state is damaged: its momentum belongs to other parameters; load what state_dict() returned"
        )
    return own


def _is_momentum(state: Any, place: Any, shapes: list[torch.Size]) -> bool:
    """Returns whether ``state`` is a valid state of SGD for the parameter at position ``place``."""
    if place not in range(len(shapes)) or not isinstance(state, Mapping) or list(state) != ["momentum_buffer"]:
        return False
    buffer = state["momentum_buffer"]
    return buffer is None or (isinstance(buffer, torch.Tensor) and buffer.shape == shapes[place])


def _momentum_after(exchanges: int, final: float) -> float:
    # Momentum averages over about 1 / (1 - factor) exchanges, which must not exceed those that have happened.
    return min(final, 1 - 0.5 / (1 + exchanges / _MOMENTUM_HALF_LIFE))


def _warn_of_misuse(parameters: list[nn.Parameter], group: Any, doubt: str | None) -> None:
    """Warns of momentum applied twice (``doubt``), and of DDP that averages gradients among the same ranks."""
    if doubt:
        warnings.warn(f"spardl: {doubt}.", stacklevel=3)
    ranks, own = set(dist.get_process_group_ranks(group or dist.group.WORLD)), set(parameters)
    # Parameters do not refer to their DDP wrapper, so it must be searched for.
    wraps = [each for each in gc.get_objects() if type(each) is nn.parallel.DistributedDataParallel]
    for ddp in wraps:
        shared = ranks & set(dist.get_process_group_ranks(ddp.process_group))
        if len(shared) > 1 and not own.isdisjoint(ddp.parameters()):
            warnings.warn(
                "spardl: these parameters are in a DistributedDataParallel that averages their gradients over "
                f"{len(shared)} of the same ranks in every step, so local steps save nothing; train the module without "
                "DDP, or pass a process group inside the node to DDP and one between nodes to Outer (group=).",
                stacklevel=3,
            )
            return


def _before_steps(optimizers: Iterable[torch.optim.Optimizer], call: Callable[..., None]) -> list[RemovableHandle]:
    """Registers ``call`` to run before each step of each optimizer, with the optimizer's number."""
    return [unwrap(each).register_step_pre_hook(partial(call, number)) for number, each in enumerate(optimizers)]


def _remove(hooks: Iterable[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _checked_optimizers(optimizer: Optimizers, parameters: set[nn.Parameter]) -> tuple[torch.optim.Optimizer, ...]:
    optimizers = optimizers_of(optimizer)
    if not optimizers:
        raise ConfigError("optimizer is None; pass the optimizer of the model, which each worker steps locally")
    if any(parameters.isdisjoint(trained_by([each])) for each in optimizers):
        raise ConfigError(
            "optimizer updates no item of parameters, so they would never change; pass the optimizer of the model"
        )
    return optimizers
