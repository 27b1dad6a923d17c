"""Gradients that the loop discards: backward passes of which nothing is carried over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager

from torch import nn

from spardl.basics.errors import ConfigError
from spardl.hooks.averager import Averager

__all__ = ["Discarding", "discarded"]


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
