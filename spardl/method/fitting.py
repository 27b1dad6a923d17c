"""Which parts fit together: what their declarations say of one another."""

from __future__ import annotations

from typing import Any

from spardl.communicators.base import Communicator
from spardl.compressors.base import Compressor, Mass, Output
from spardl.method import registry
from spardl.method.momentum import Momentum, OptimizerMomentum
from spardl.method.residuals import Residual

__all__ = ["why_not"]


def why_not(
    compressor: type[Compressor],
    communicator: type[Communicator[Any]],
    residual: type[Residual],
    momentum: type[Momentum] = OptimizerMomentum,
) -> str | None:
    """Why parts do not fit together.

    Args:
        compressor: what one worker sends.
        communicator: how the sent is added up.
        residual: where the rest goes.
        momentum: what is compressed.

    Returns:
        One sentence, naming those that would fit; ``None`` if these do.
    """
    if compressor.output not in communicator.sums:
        legal = [name for name, kind in registry.communicators().items() if compressor.output in kind.sums]
        others = [name for name, kind in registry.compressors().items() if kind.output in communicator.sums]
        return (
            f"communicator={communicator.name} cannot add up {compressor.output.value}, which compressor="
            f"{compressor.name} makes; with it use communicator={' or '.join(legal)}, or with "
            f"communicator={communicator.name} use compressor={' or '.join(others)}"
        )
    if not _residual_fits(compressor, residual):
        rules = [name for name, rule in registry.residual_rules().items() if _residual_fits(compressor, rule)]
        return (
            f"residual={residual.name} does not fit compressor={compressor.name} ({_nature(compressor)}); "
            f"with it use residual={' or '.join(rules)}"
        )
    if momentum.masks and not compressor.sparsifies:
        return (
            f"momentum={momentum.name} stops the velocity at the entries that were sent, and compressor="
            f"{compressor.name} sends no single entries; use momentum=local or momentum=optimizer"
        )
    return None


def _residual_fits(compressor: type[Compressor], residual: type[Residual]) -> bool:
    return not (
        (residual.remembers and compressor.mass is not Mass.LEFT)
        or (residual.needs_entries and not compressor.sparsifies)
        or (residual.needs_count and compressor.output is Output.ANY_COUNT)
    )


def _nature(compressor: type[Compressor]) -> str:
    entries = "sends single entries" if compressor.sparsifies else "sends no single entries"
    number = ", any number of them" if compressor.output is Output.ANY_COUNT else ""
    return f"it {entries}{number}; what it leaves out: {compressor.mass.value}"
