"""Whose state it is: what a saved state says of the worker that saved it, and how that is checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from spardl.basics.errors import ConfigError
from spardl.communicators.base import DenseCommunicator
from spardl.method import registry
from spardl.method.method import Method

__all__ = ["check_owner", "check_whole", "owner_of"]

# Parts of a state that are there once something was measured, and begin anew where they are not.
_LATER = frozenset({"spread"})


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
    saved = values.get("owner") if isinstance(values, Mapping) else None
    if saved is None or holds not in values or not isinstance(saved, Mapping) or saved.keys() != mine.keys():
        raise ConfigError("this is no state of such a handle; load what its state_dict() gave")
    check_whole(saved, mine, "owner")
    if not all(isinstance(part, str) for part in saved["parts"]):
        raise _broken("has parts that are no names")
    if (saved["rank"], saved["workers"]) != (mine["rank"], mine["workers"]):
        raise ConfigError(
            f"this state is of rank {saved['rank']} of {saved['workers']}, and this is rank {mine['rank']} of "
            f"{mine['workers']}: a residual is each worker's own, so save and load it on every rank, of as many"
            " (in torch.distributed.checkpoint by a key for each rank)"
        )
    if _lasting(saved["parts"]) != _lasting(mine["parts"]):
        raise ConfigError(
            f"this state is of {' + '.join(saved['parts'])}, and this method is {' + '.join(mine['parts'])}; load it "
            "into the method that it was saved by"
        )


def _lasting(parts: Iterable[Any]) -> list[Any]:
    """Parts of a method as far as a state depends on them: communicators that sum dense tensors leave nothing in it."""
    kinds = registry.communicators().values()
    dense = [kind.__name__ for kind in kinds if issubclass(kind, DenseCommunicator)]
    return [DenseCommunicator.__name__ if part in dense else part for part in parts]


def check_whole(saved: Any, mine: Any, path: str = "") -> None:
    """Accepts a state that lacks nothing.

    Args:
        saved: the state, or a part of it.
        mine: what this handle would save now; or as much of it as is to be looked at.
        path: of the part.

    Raises:
        ConfigError: if something is missing, or is no mapping or list where it should be one.
    """
    if not isinstance(mine, Mapping | list):
        return
    wanted: Any = Mapping if isinstance(mine, Mapping) else (list, tuple)
    if not isinstance(saved, wanted):
        kind = "dict" if isinstance(mine, Mapping) else "list"
        raise _broken(f"has a {type(saved).__name__} as {path}, not a {kind}")
    if isinstance(mine, list):
        for place, (theirs, own) in enumerate(zip(saved, mine, strict=False)):
            check_whole(theirs, own, f"{path}[{place}]")
        return
    for name, own in mine.items():
        inner = f"{path}.{name}".lstrip(".")
        if name not in saved and name in _LATER:
            continue
        if name not in saved:
            raise _broken(f"lacks {inner}")
        check_whole(saved[name], own, inner)


def _broken(what: str) -> ConfigError:
    return ConfigError(f"this state {what}; load what state_dict() gave, whole")
