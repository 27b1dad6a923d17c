"""Whose state it is: what a saved state says of the worker that saved it, and how that is checked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from spardl.basics.errors import ConfigError
from spardl.basics.version import __version__
from spardl.communicators.base import DenseCommunicator
from spardl.communicators.steps.transfer import all_gather
from spardl.method import registry
from spardl.method.method import Method
from spardl.protocol.programs import Program, Worker, whole_team

__all__ = [
    "check_owner",
    "check_whole",
    "compare",
    "compare_if_told",
    "facts_of",
    "first_difference",
    "kind_of",
    "owner_of",
    "shapes_of",
]


# Whether all workers were given the same, asked before the first gradient is sent.
#
# The size of a message follows from what both sides know, so workers that know different things break one another's
# connections, or wait for what never comes. What they compare here is of one size whatever they were given: a digest.
# Only where digests differ do they exchange the rest, and each of them can say what differs.


def compare(worker: Worker, facts: Mapping[str, str], device: torch.device) -> Program[None]:
    """The program of one worker that compares what it was given with what the others were.

    Args:
        worker: who runs it.
        facts: what it was given, by name; the first that differ are told.
        device: where messages live.

    Raises:
        ConfigError: on all workers, if there is a difference; the message names two of them, and what each has.
    """
    text = json.dumps(dict(facts)).encode()
    digests = yield from _gathered(worker, hashlib.sha256(text).digest(), [32] * worker.size, device)
    if len(set(digests)) == 1:
        return
    lengths = yield from _gathered(worker, len(text).to_bytes(8, "big"), [8] * worker.size, device)
    texts = yield from _gathered(worker, text, [int.from_bytes(length, "big") for length in lengths], device)
    raise ConfigError(first_difference([json.loads(each) for each in texts]))


def compare_if_told(
    worker: Worker, told: bool, facts: Callable[[], Mapping[str, str]], device: torch.device
) -> Program[None]:
    """The program of one worker with which all compare what they have if one of them loaded a state.

    Args:
        worker: who runs it.
        told: whether this worker loaded a state since the last time.
        facts: gives what this worker has.
        device: where messages live.

    Raises:
        ConfigError: as ``compare``.
    """
    flags = yield from _gathered(worker, bytes([told]), [1] * worker.size, device)
    if any(any(flag) for flag in flags):
        yield from compare(worker, facts(), device)


def _gathered(worker: Worker, mine: bytes, sizes: Sequence[int], device: torch.device) -> Program[list[bytes]]:
    item = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    items: list[Tensor] = yield from all_gather(whole_team(worker), item, sizes, sizes)
    return [each.cpu().numpy().tobytes() for each in items]


def first_difference(rows: Sequence[Mapping[str, str]]) -> str | None:
    """What two workers were given differently, in words.

    Args:
        rows: what each was given, by rank.

    Returns:
        One sentence on rank 0 and the first that differs from it; ``None`` if all have the same.
    """
    first = rows[0]
    for rank, row in enumerate(rows):
        longer, shorter = sorted((first, row), key=len, reverse=True)  # names of the longer one are in their order
        for name in dict.fromkeys((*longer, *shorter)):
            if first.get(name) != row.get(name):
                said = f"{_said(rank, row, name)}, {_said(0, first, name)}"
                return f"{said}: all workers must be given the same"
    return None


def _said(rank: int, row: Mapping[str, str], name: str) -> str:
    return f"rank {rank} has {name}={row[name]}" if name in row else f"rank {rank} has no {name}"


def facts_of(method: Method) -> dict[str, str]:
    """What a method consists of, by name: its parts, and the options of each."""
    parts = [getattr(method, field.name) for field in fields(method)]
    main = (method.compressor, method.communicator, method.residual, method.momentum)
    facts = {"version": __version__, "method": " + ".join(type(part).__name__ for part in main)}
    for part in parts:
        for name, value in _options(part):
            facts[f"{type(part).__name__}.{name}" if name in facts else name] = _plain(value)
    return facts


def shapes_of(names: Sequence[str], parameters: Sequence[Tensor]) -> dict[str, str]:
    """Type and shape of each of some ``parameters``, by its place and its name, of ``names``."""
    pairs = enumerate(zip(names, parameters, strict=True))
    return {f"parameter {number} ({name})": kind_of(parameter) for number, (name, parameter) in pairs}


def kind_of(tensor: Tensor) -> str:
    """Type and shape of ``tensor``, in words, of any shape."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _options(part: Any) -> Iterable[tuple[str, Any]]:
    own = getattr(part, "__dict__", {})
    if not is_dataclass(part):
        return own.items()
    # A part that somebody derived from one of ours may have more than its fields.
    named = {field.name for field in fields(part)}
    told = [(field.name, getattr(part, field.name)) for field in fields(part) if field.init]
    return [*told, *((name, value) for name, value in own.items() if name not in named)]


def _plain(value: Any) -> str:
    """A value as a text that is the same in every process which was given the same."""
    if value is None or isinstance(value, str | Number | torch.dtype):
        return repr(value) if isinstance(value, str) else str(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{_plain(key)}: {_plain(each)}" for key, each in value.items())) + "}"
    if isinstance(value, Set):
        return "{" + ", ".join(sorted(map(_plain, value))) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_plain, value)) + "]"
    if is_dataclass(value):
        return f"{type(value).__name__}({', '.join(f'{name}={_plain(each)}' for name, each in _options(value))})"
    return type(value).__name__


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
