"""Outer steps: workers train alone for some steps, then average how far each has come, through any method.

Source: that of :class:`spardl.OuterSteps`, which does the same in the trainer, for real and simulated workers.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spardl.basics.checks import check_kind, check_real, check_seconds
from spardl.basics.errors import ConfigError
from spardl.basics.weak import weakly, when_dropped
from spardl.clusters.precompile import prepare
from spardl.communicators.steps.transfer import all_gather
from spardl.hooks.averager import Averager, Beside, Meter, Named, Stats
from spardl.hooks.choosing import choose_method, choose_schedule, options_of
from spardl.hooks.synchronizer import check_frozen, check_trained, trained_and_frozen
from spardl.method.method import Method
from spardl.method.moving import applied_twice, definite
from spardl.method.names import MethodName
from spardl.method.provenance import check_whole
from spardl.protocol.programs import Program, Worker, copied, whole_team
from spardl.schedules import OuterSteps, Schedule, Training
from spardl.schedules.carried import on_average
from spardl.schedules.fusion import by_share
from spardl.schedules.outer import Turns, go_on
from spardl.schedules.plain import unwrapped
from spardl.vector.flat import CopiedGradient, Layer, layers_of

__all__ = ["Fragment", "Outer", "Part", "agree", "cut"]


# Parts of a model that are averaged in turns, each by an averager of its own; see :class:`spardl.Outer`.


class Part(NamedTuple):
    """Some parameters in a row.

    Attributes:
        named: they and their names, in the order in which the model uses them.
        places: of them among all, counted from the last: the order of the backward pass.
    """

    named: Sequence[Named]
    places: range


def cut(named: Sequence[Named], count: int) -> list[Part]:
    """Parts of neighbouring layers, and nearly as many entries each.

    Args:
        named: all parameters, in the order in which the model uses them; without names of modules, each is a layer.
        count: of the parts.

    Raises:
        ConfigError: if there are fewer layers.
    """
    layers = list(_layers(named))
    found = []
    for first, stop in by_share([layer.entries for layer in layers], count):
        begin, end = layers[first].tensors[0], layers[stop - 1].tensors[1]
        found.append(Part(named[begin:end], range(len(named) - end, len(named) - begin)))
    return found


def _layers(named: Sequence[Named]) -> Iterator[Layer]:
    names, parameters = [pair.name for pair in named], [pair.parameter for pair in named]
    if any("." in name for name in names):
        return layers_of(names, parameters)
    return (Layer(name, (place, place + 1), each.numel()) for place, (name, each) in enumerate(named))


def agree(worker: Worker, number: int, count: int, device: torch.device) -> Program[None]:
    """The program of one worker that sees to it that all are about to send the same fragment.

    Args:
        worker: who runs it.
        number: of the fragment.
        count: of all fragments.
        device: where messages live.

    Raises:
        ConfigError: on all workers, if they are not.
    """
    ones = [1] * worker.size
    item = torch.tensor([number], device=device)
    gathered: list[Tensor] = yield from all_gather(whole_team(worker), item, ones, ones)
    found = [int(each) for each in gathered]
    other = next((rank for rank, each in enumerate(found) if each != found[0]), None)
    if other is not None:
        raise ConfigError(
            f"rank {other} sends fragment {found[other] + 1} of {count}, and rank 0 fragment {found[0] + 1}, so one "
            "has made more steps; give all workers as many batches, and let all call exchange() after the same one"
        )


class Fragment:
    """A part that is averaged by itself, beside whatever else its worker does.

    Args:
        part: which.
        method: how.
        schedule: in which groups.
        cluster: the workers.
        given: what else all workers must be given the same, by name.

    Attributes:
        places: of its parameters among all.
        averager: of its differences.

    Raises:
        ConfigError: if the method does not run on so many workers.
    """

    def __init__(
        self, part: Part, method: Method, schedule: Schedule, cluster: Beside, given: Mapping[str, Any]
    ) -> None:
        self.places = part.places
        gradient = CopiedGradient(part.named)
        self._parameters = gradient.parameters
        self.averager = Averager(method, schedule, Training(None, gradient, None), cluster, given)

    def send(self, differences: Iterable[Tensor]) -> None:
        """Sends what a worker has come to, and does not wait.

        Args:
            differences: one for each parameter, of its shape, in the order of ``places``.

        Raises:
            ConfigError: on all workers, the first time, if they were not given the same.
            PeerError: if another worker is lost the first time, or does not come in time.
        """
        for number, difference in enumerate(differences):
            self.averager.put(number, difference)

    def averages(self) -> Iterator[Tensor]:
        """Averages of the differences, in parameters' shapes and the order of ``places``, once they have arrived."""
        for number, parameter in enumerate(self._parameters):
            found = torch.empty_like(parameter)
            self.averager.gradient.take(number, found)
            yield found


# Exchanges after which momentum is halfway from 0.5 to 1, and the outer rate where a residual replaces momentum: chosen
# by short and long trainings (docs/training-loop.md).
_RISING, _LR_WITH_RESIDUAL = 12, 1.5


class _NoOptimizer:
    """Refuses a GradScaler, which takes anything with ``step()`` for an optimizer."""

    @property
    def param_groups(self) -> NoReturn:
        """Not available, because an ``Outer`` is not an optimizer: a ``GradScaler`` must step the optimizer itself.

        A scaler skips steps that overflow on this worker, while all workers must count the same steps.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "an Outer is not an optimizer, so scaler.step(outer) and scaler.unscale_(outer) cannot work; call "
            "scaler.step(optimizer) and then outer.count(), also after a step that the scaler skipped"
        )


class Outer(_NoOptimizer):
    """Calls ``optimizer.step()``, and after every so many steps averages how far the workers have come.

    In place of ``optimizer.step()``::

        outer = spardl.Outer(model.named_parameters(), optimizer, "spardl", every=30, density=0.01)
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss_function(model(inputs), targets).backward()
            outer.step()

    The model is not wrapped in DDP, or only within a node, with ``group`` between nodes. Parameters that are trained
    are copied from rank 0 of the group when this is made, so load a checkpoint before. They are equal on all workers
    after each exchange; buffers and the optimizer's state stay local. With ``fragments``, ``delay`` and ``mixing``,
    parts of the model are sent in turns during the next local steps, as in Streaming DiLoCo; call ``exchange()`` after
    the last step. With a ``GradScaler``, call ``scaler.step(optimizer)`` and ``outer.count()``, not ``outer.step()``.

    Args:
        parameters: as ``model.named_parameters()`` or ``model.parameters()`` has them.
        optimizer: of these parameters, which each worker calls alone.
        method: a name (``spardl.method_names()``), or a :class:`Method`.
        every: steps between two exchanges.
        lr: factor of the outer SGD's steps; 1 without momentum averages weights (local SGD); ``None``: 0.7, and 1.5
            where ``momentum=None`` gives 0 and exchanges are neither delayed nor mixed.
        momentum: Nesterov momentum of the outer SGD; ``None``: 0 for a method with a residual, otherwise 0.5 rising to
            0.9 in the 49th exchange. DiLoCo uses ``lr=0.7, momentum=0.9``, which needs more than a few dozen exchanges.
        fragments: parts of the model, of neighbouring layers and nearly as many entries each, that are exchanged in
            turns, each after every ``every`` steps.
        delay: local steps beside which a fragment is sent; 0: workers wait for it.
        mixing: share of the weights that an exchange led to in those that a worker goes on with; the rest is its own.
        group: a process group; ``None`` for the default one.
        bucket_mb: most megabytes (2^20 bytes) of differences that are averaged together.
        timeout: seconds after which a silent worker counts as lost.
        **options: of the method, for instance ``density=0.01``; see :class:`Recipe`.

    Attributes:
        method: how differences are averaged.
        momentum: factor of the outer SGD; if it rises, its final value.

    Raises:
        ConfigError: if there are no parameters, or a value is out of range, or the method or an option is unknown, or
            does not fit so many workers, or the method has a momentum of its own, or there are fewer layers than
            fragments.

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

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
        optimizer: torch.optim.Optimizer,
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
        check_kind("optimizer", optimizer, torch.optim.Optimizer)
        outer = OuterSteps(every, 0.7 if lr is None else lr, momentum, fragments, delay, mixing)
        check_seconds("timeout", timeout)
        named, self._frozen = trained_and_frozen(parameters)
        if not named:
            raise ConfigError("there are no parameters to average")
        check_real(named)
        _check_trains(optimizer, {pair.parameter for pair in named})
        self.method = definite(choose_method(method, options), None)
        outer.check(self.method, clips=False)
        alone = momentum is None and self.method.residual.remembers
        if lr is None and alone and not delay and mixing == 1:
            outer = replace(outer, lr=_LR_WITH_RESIDUAL)
        parts = cut(named, fragments)
        self._optimizer, self._outer, self._since, self._named = optimizer, outer, 0, named
        self._turns = Turns(every, fragments)
        # In the order of the backward pass, and so are their places.
        self._parameters = [pair.parameter for pair in reversed(named)]
        self._cluster = Beside(group, self._parameters[0].device, timeout)
        prepare(self.method, self._cluster.size, self._parameters, tells=self._cluster.leads)
        self._cluster.open()
        schedule = choose_schedule("wfbp", bucket_mb)
        self._anchors = [nn.Parameter(parameter.detach().clone()) for parameter in self._parameters]
        self._rule = outer.rule(self._anchors, self.method)
        self.momentum: float = self._rule.defaults["momentum"]
        self._rises = momentum is None and self.momentum > 0
        self._exchanges = [0] * fragments
        given = {
            "handle": "Outer",
            **asdict(outer),
            "momentum": momentum if self._rises else self.momentum,
            **options_of(schedule),
        }
        self._fragments = [Fragment(part, self.method, schedule, self._cluster, given) for part in parts]
        self._meter = Meter(self._cluster.ledgers[0], self._cluster.size)
        _warn(self._parameters, group, applied_twice(self.method, self._rule))
        self._begin_alike(group)
        self._begun = self._closed = False
        self._uncounted = 0
        self._hook = unwrapped(optimizer).register_step_pre_hook(weakly(self._stepping))
        when_dropped(self, self._hook.remove)

    @torch.no_grad()
    def _begin_alike(self, group: Any) -> None:
        for parameter, anchor in zip(self._parameters, self._anchors, strict=True):
            # Memory is what travels, and workers may have laid theirs out differently.
            first = parameter.contiguous()
            dist.broadcast(first, dist.get_global_rank(group, 0) if group else 0, group)
            parameter.copy_(first)
            anchor.copy_(first)

    def _stepping(self, *_: object) -> None:
        """The optimizer makes a step: of this, or of the loop, which is to count it."""
        self._check_parameters()
        self._begin()
        self._uncounted += 1
        if self._uncounted == self._outer.every + 1:
            warnings.warn(
                f"spardl: optimizer.step() was called {self._uncounted} times, and Outer was told of none, so it sends "
                "nothing; call outer.step() in its place, or outer.count() after each.",
                stacklevel=4,
            )

    def _begin(self) -> None:
        """Before the first step, weights are those that all workers were given when this was made."""
        if self._begun:
            return
        own = {each for group in self._optimizer.param_groups for each in group["params"]}
        pairs = zip(self._parameters, self._anchors, strict=True)
        # Others may have an optimizer that made a step before this.
        same = [torch.equal(*pair) for pair in pairs if pair[0] in own]
        if not any(same):
            raise ConfigError(
                "weights were changed since this Outer was made, and its first exchange would take that back; load "
                "them first, on rank 0 at least, and make it then"
            )
        if not all(same):  # by a forward pass, as max_norm of an embedding does, or by loading some
            warnings.warn(
                f"spardl: {same.count(False)} of {len(same)} parameters were changed since this Outer was made, and "
                "its first exchange takes that for steps of this worker; if they were loaded, load before it is made.",
                stacklevel=3,
            )
        self._begun = True

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this Outer was closed, and exchanges nothing more; make another to go on")

    def _check_parameters(self) -> None:
        check_frozen(self._frozen)
        check_trained(self._named)
        for averager in self._averagers:
            averager.check_kinds()

    @property
    def _averagers(self) -> list[Averager]:
        return [fragment.averager for fragment in self._fragments]

    @property
    def since(self) -> int:
        """Steps since the last exchange, of whatever fragment, or since the beginning."""
        return self._since

    def step(self) -> None:
        """A step of this worker's own, and an exchange if one is due.

        Raises:
            ConfigError: on all workers, in the first exchange, if they were not given the same, or in a later one, if
                they send different fragments; if weights were changed before the first step, a parameter was frozen or
                no longer is since this was made, or this was closed.
            PeerError: if another worker is lost, or does not answer in time.
        """
        self._check_open()
        self._optimizer.step()
        self.count()

    def count(self) -> None:
        """Is told of a step that somebody else made, and exchanges what it is time for.

        Raises:
            ConfigError: as ``step``.
            PeerError: if another worker is lost, or does not answer in time.
        """
        self._check_open()
        self._check_parameters()
        self._begun, self._uncounted = True, 0
        self._since += 1
        due = self._turns.step()
        for number in due.landing:
            self._land(number)
        for number in due.leaving:
            self._leave(number, self._outer.delay)

    @torch.no_grad()
    def exchange(self) -> None:
        """Averages how far all workers have come since the last exchange, and sets their weights equal.

        What is under way arrives first; turns of fragments begin anew.

        Raises:
            ConfigError: as ``step``.
            PeerError: if another worker is lost, or does not answer in time.
        """
        self._check_open()
        self._begin()
        for number in list(self._turns.aloft):
            self._land(number)
        for number in self._turns.begun or range(len(self._fragments)):
            self._leave(number, 0)
        for parameter, anchor in zip(self._parameters, self._anchors, strict=True):
            parameter.copy_(anchor)
        self._turns, self._since = Turns(self._outer.every, len(self._fragments)), 0

    @torch.no_grad()
    def _leave(self, number: int, delay: int) -> None:
        """Sends how far this worker has come in a fragment; its weights follow after so many steps."""
        places = self._fragments[number].places
        self._see_others_leave(number)
        self._fragments[number].send(self._anchors[place] - self._parameters[place] for place in places)
        self._turns.leave(number, delay)
        self._since = 0
        if not delay:
            self._land(number)

    def _see_others_leave(self, number: int) -> None:
        """All workers send the same fragment next, or what is sent next fails: nobody waits for that here."""
        if len(self._fragments) > 1:
            (worker,), device = self._cluster.local_workers, self._cluster.device
            program = agree(worker, number, len(self._fragments), device)
            self._cluster.flight([program], counted=False).release(0)

    def _land(self, number: int) -> None:
        """This worker goes on from what an exchange led to."""
        self._outer_step(number)
        # All of them do so after the same step, whoever has looked at averages before, to save them.
        self._fragments[number].averager.tell_refusals("; all go on from the weights of the last exchange")
        self._turns.land(number)
        for place in self._fragments[number].places:
            go_on(self._parameters[place], self._anchors[place], self._outer.mixing)

    def _outer_step(self, number: int) -> None:
        """The outer step of a fragment, once it has been sent."""
        fragment = self._fragments[number]
        if not fragment.averager.receive():
            return
        self._meter.step()
        anchors = [self._anchors[place] for place in fragment.places]
        for anchor, average in zip(anchors, fragment.averages(), strict=True):
            anchor.grad = average
        if self._rises:
            self._rule.param_groups[0]["momentum"] = _risen(self._exchanges[number], self.momentum)
        self._exchanges[number] += 1
        self._rule.step()
        for anchor in anchors:
            anchor.grad = None

    def state_dict(self) -> dict[str, Any]:
        """What this worker carries from step to step, its weights included; to be saved by each rank.

        What is under way is waited for; workers go on from it when it is time, as if nobody had looked.

        Raises:
            PeerError: if another worker is lost, or does not answer in time.
        """
        for number in self._turns.aloft:
            self._outer_step(number)
        first, *others = (fragment.averager.state_dict() for fragment in self._fragments)
        return {
            **first,
            "outer": {
                "since": self._since,
                "exchanges": list(self._exchanges),
                "left": list(self._turns.left),
                "aloft": dict(self._turns.aloft),
                "fragments": others,
                "weights": [parameter.detach().clone() for parameter in self._parameters],
                "anchors": [anchor.detach().clone() for anchor in self._anchors],
                "rule": copied(self._rule.state_dict()["state"]),
            },
        }

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Continues from what ``state_dict`` gave on the same rank, of as many; load the optimizer's, too.

        Weights become those that were saved with it. The outer rate and momentum stay what this was made with.

        Args:
            values: as saved.

        Raises:
            ConfigError: if it is of another rank, another number of workers, another method, other parameters, or of
                other ``fragments`` or another ``bucket_mb``, or lacks something; nothing is changed then.
            PeerError: if something was under way, and another worker is lost.
        """
        if not isinstance(values, Mapping) or "outer" not in values:
            raise ConfigError("this is no state of an Outer; load what its state_dict() gave")
        check_whole(values["outer"], {"since": 0, "weights": [], "anchors": [], "rule": {}}, "outer")
        own = {"left": [], "aloft": {}, "fragments": [], **values["outer"]}
        _check_own(own, [parameter.shape for parameter in self._parameters], self._fragments)
        states = [{name: value for name, value in values.items() if name != "outer"}, *own["fragments"]]
        pairs = list(zip(self._averagers, states, strict=True))
        for averager, state in pairs:
            averager.check_state(state)
        for averager, state in pairs:
            averager.receive()
            averager.load_state_dict(state)
        self._since = own["since"]
        # A state without the number was saved when momentum did not rise.
        self._exchanges = list(own.get("exchanges", [_RISING * 100] * len(self._fragments)))
        # What is sent whole needs no turns, which an older state lacks, and may be sent more often from here on.
        whole = [max(1, self._outer.every - own["since"])]
        self._turns.left = list(own["left"]) if own["fragments"] else whole
        self._turns.aloft = dict(own["aloft"])
        self._rule.load_state_dict({**self._rule.state_dict(), "state": copied(own["rule"])})
        self._begun = True
        with torch.no_grad():
            for into, name in ((self._parameters, "weights"), (self._anchors, "anchors")):
                for tensor, saved in zip(into, own[name], strict=True):
                    tensor.copy_(saved)

    def stats(self) -> Stats:
        """What this worker sent and spent so far; a step of it is an exchange; see :class:`Stats`.

        Of fragments, what waits is the mean of what waits in each.
        """
        nbytes = sum(parameter.nbytes for parameter in self._parameters) / len(self._fragments)
        refused = sum(averager.refused for averager in self._averagers)
        return self._meter.stats(nbytes, refused, on_average(each.engine.waiting() for each in self._averagers))

    def close(self) -> None:
        """Gives back what this took of the process group; the optimizer is the caller's alone."""
        self._closed = True
        self._hook.remove()
        self._cluster.release()


def _check_own(own: Mapping[str, Any], shapes: list[torch.Size], fragments: list[Fragment]) -> None:
    """Accepts what a saved state has besides those of fragments' averagers.

    Args:
        own: what it has.
        shapes: of all parameters, in their places.
        fragments: of the handle.

    Raises:
        ConfigError: if something is of another kind or shape.
    """
    for name in ("weights", "anchors"):
        if [getattr(saved, "shape", None) for saved in own[name]] != shapes:
            raise ConfigError("this state is of other parameters; load it where it was saved")
    others, left, aloft, exchanges = (own.get(name, []) for name in ("fragments", "left", "aloft", "exchanges"))
    lists = all(isinstance(each, list) for each in (others, left, exchanges)) and isinstance(aloft, Mapping)
    counts = [own["since"], *left, *exchanges, *aloft.keys(), *aloft.values()] if lists else [None]
    if not all(type(count) is int and count >= 0 for count in counts):
        raise ConfigError("this state is damaged: its turns or exchanges are no counts; load what state_dict() gave")
    if len(others) + 1 != len(fragments):
        raise ConfigError(f"this state is of fragments={len(others) + 1}; load it where it was saved")
    for name, found in (("turns", left if others else fragments), ("exchanges", own.get("exchanges", fragments))):
        if len(found) != len(fragments):
            raise ConfigError(
                f"this state is damaged: it has {name} of {len(found)} fragments, expected {len(fragments)}; load what "
                "state_dict() gave"
            )
    rule = own["rule"]
    whole = all(len(rule.keys() & set(each.places)) in (0, len(each.places)) for each in fragments)
    if not whole or not all(_is_moment(state, place, shapes) for place, state in rule.items()):
        raise ConfigError("this state is damaged: its momentum is of other parameters; load what state_dict() gave")


def _is_moment(state: Any, place: Any, shapes: list[torch.Size]) -> bool:
    """Whether a saved state is what the outer SGD has of the parameter in a place."""
    if place not in range(len(shapes)) or not isinstance(state, Mapping) or list(state) != ["momentum_buffer"]:
        return False
    buffer = state["momentum_buffer"]
    return buffer is None or (isinstance(buffer, torch.Tensor) and buffer.shape == shapes[place])


def _risen(exchanges: int, final: float) -> float:
    """Momentum after a number of exchanges: an average over no more of them than there were."""
    return min(final, 1 - 0.5 / (1 + exchanges / _RISING))


def _warn(parameters: list[nn.Parameter], group: Any, doubt: str | None) -> None:
    """Of momentum that is applied twice, and of local steps over gradients that DDP averages among the same ranks."""
    if doubt:
        warnings.warn(f"spardl: {doubt}.", stacklevel=3)
    ranks, own = set(dist.get_process_group_ranks(group or dist.group.WORLD)), set(parameters)
    wraps = [each for each in gc.get_objects() if type(each) is nn.parallel.DistributedDataParallel]
    for ddp in wraps:
        shared = ranks & set(dist.get_process_group_ranks(ddp.process_group))
        if len(shared) > 1 and not own.isdisjoint(ddp.parameters()):
            warnings.warn(
                "spardl: these parameters are in a DistributedDataParallel that averages the gradients of "
                f"{len(shared)} of the same ranks in every step, so local steps save nothing; use the module "
                "without it, or give it the process group of a node and Outer, as group=, one between nodes.",
                stacklevel=3,
            )
            return


def _check_trains(optimizer: torch.optim.Optimizer, parameters: set[nn.Parameter]) -> None:
    if parameters.isdisjoint(each for group in optimizer.param_groups for each in group["params"]):
        raise ConfigError(
            "the optimizer has none of the parameters, so they would never change; give that of the model"
        )
