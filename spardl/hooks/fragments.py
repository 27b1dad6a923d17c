"""Parts of a model that are averaged in turns, each by an averager of its own; see :class:`spardl.Outer`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spardl.basics.errors import ConfigError
from spardl.communicators.steps.bruck import all_gather
from spardl.hooks.averager import Averager, Beside, Named
from spardl.method.method import Method
from spardl.protocol.programs import Program, Worker, whole_team
from spardl.schedules import Schedule, Training
from spardl.schedules.fusion import by_share
from spardl.vector.flat import layers_of
from spardl.vector.storage import CopiedGradient, Layer

__all__ = ["Fragment", "Part", "agree", "cut"]


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
