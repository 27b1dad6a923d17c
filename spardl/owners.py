"""Whose state it is: what a saved state says of the worker that saved it, and how that is checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spardl.errors import ConfigError
from spardl.method import Method

__all__ = ["check_owner", "owner_of"]


def owner_of(method: Method, rank: int, workers: int) -> dict[str, Any]:
    """What a state says of its owner.

    Args:
        method: that the state is of; its options may change.
        rank: of the worker.
        workers: how many there are.
    """
    parts = (method.compressor, method.communicator, method.residual, method.momentum)
    return {"rank": rank, "workers": workers, "parts": [type(part).__name__ for part in parts]}


def check_owner(values: Mapping[str, Any], mine: Mapping[str, Any], holds: str) -> None:
    """Accepts a state that the same worker saved, of as many, with the same parts.

    Args:
        values: the state.
        mine: what it should say of its owner.
        holds: a key that states of this kind of handle have.

    Raises:
        ConfigError: if it is another's.
    """
    saved = values.get("owner")
    if holds not in values or not isinstance(saved, Mapping) or saved.keys() != mine.keys():
        raise ConfigError("this is no state of such a handle; load what its state_dict() gave")
    if (saved["rank"], saved["workers"]) != (mine["rank"], mine["workers"]):
        raise ConfigError(
            f"this state is of rank {saved['rank']} of {saved['workers']}, and this is rank {mine['rank']} of "
            f"{mine['workers']}: a residual is each worker's own, so save and load it on every rank, of as many"
        )
    if saved["parts"] != mine["parts"]:
        raise ConfigError(
            f"this state is of {' + '.join(saved['parts'])}, and this method is {' + '.join(mine['parts'])}; load it "
            "into the method that it was saved by"
        )
