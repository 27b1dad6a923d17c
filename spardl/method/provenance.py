"""Checks that all workers have equal settings, and that a saved state belongs to the worker that loads it.

Functions that return a ``Program`` are generators that request the messages of one worker (see
``spardl.protocol.programs``).
"""

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
    "compare_if_loaded",
    "first_difference",
    "kind_of",
    "method_settings",
    "owner_of",
    "shapes_of",
]


# Comparison of the settings of all workers, before they send the first gradient.
#
# Message sizes follow from the settings of sender and receiver, so workers with different settings would break their
# connections, or wait for messages that never arrive. They therefore first compare digests, whose size does not depend
# on the settings. If digests differ, they exchange the settings, so that each worker can report the difference.


def compare(worker: Worker, facts: Mapping[str, str], device: torch.device) -> Program[None]:
    """Compares the settings of all workers; a generator that every worker runs.

    Args:
        worker: Worker that runs this generator.
        facts: Settings of the worker by name; the first difference is reported.
        device: Device of the messages.

    Raises:
        ConfigError: On all workers, if settings differ; the message names two workers and their values.
    """
    text = json.dumps(dict(facts)).encode()
    digests = yield from _gather_bytes(worker, hashlib.sha256(text).digest(), [32] * worker.size, device)
    if len(set(digests)) == 1:
        return
    lengths = yield from _gather_bytes(worker, len(text).to_bytes(8, "big"), [8] * worker.size, device)
    texts = yield from _gather_bytes(worker, text, [int.from_bytes(length, "big") for length in lengths], device)
    raise ConfigError(first_difference([json.loads(each) for each in texts]))


def compare_if_loaded(
    worker: Worker, loaded: bool, facts: Callable[[], Mapping[str, str]], device: torch.device
) -> Program[None]:
    """Compares the settings of all workers if any worker has loaded a state; a generator that every worker runs.

    Args:
        worker: Worker that runs this generator.
        loaded: Whether this worker has loaded a state since the last comparison.
        facts: Callback that returns the settings of this worker.
        device: Device of the messages.

    Raises:
        ConfigError: On all workers, if settings differ; the message names two workers and their values.
    """
    flags = yield from _gather_bytes(worker, bytes([loaded]), [1] * worker.size, device)
    if any(any(flag) for flag in flags):
        yield from compare(worker, facts(), device)


def _gather_bytes(worker: Worker, mine: bytes, sizes: Sequence[int], device: torch.device) -> Program[list[bytes]]:
    item = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    items: list[Tensor] = yield from all_gather(whole_team(worker), item, sizes, sizes)
    return [each.cpu().numpy().tobytes() for each in items]


def first_difference(rows: Sequence[Mapping[str, str]]) -> str | None:
    """Describes the first difference between the settings of two workers.

    Args:
        rows: Settings of each worker, by rank.

    Returns:
        One sentence that names the setting, rank 0 and the first rank that differs from it; ``None`` if all are equal.
    """
    first = rows[0]
    for rank, row in enumerate(rows):
        longer, shorter = sorted((first, row), key=len, reverse=True)  # names of the longer one are in their order
        for name in dict.fromkeys((*longer, *shorter)):
            if first.get(name) != row.get(name):
                values = f"{_value_of(rank, row, name)}, {_value_of(0, first, name)}"
                return f"{values}; all workers need the same value"
    return None


def _value_of(rank: int, row: Mapping[str, str], name: str) -> str:
    return f"rank {rank} has {name}={row[name]}" if name in row else f"rank {rank} has no {name}"


def method_settings(method: Method) -> dict[str, str]:
    """Returns the settings of a method by name: its parts, and the options of each part."""
    parts = [getattr(method, field.name) for field in fields(method)]
    main = (method.compressor, method.communicator, method.residual, method.momentum)
    facts = {"version": __version__, "method": " + ".join(type(part).__name__ for part in main)}
    for part in parts:
        for name, value in _options(part):
            facts[f"{type(part).__name__}.{name}" if name in facts else name] = _stable_text(value)
    return facts


def shapes_of(names: Sequence[str], parameters: Sequence[Tensor]) -> dict[str, str]:
    """Returns dtype and shape of each of the ``parameters`` as text.

    Each key contains the number of the parameter, and its name from ``names``.
    """
    pairs = enumerate(zip(names, parameters, strict=True))
    return {f"parameter {number} ({name})": kind_of(parameter) for number, (name, parameter) in pairs}


def kind_of(tensor: Tensor) -> str:
    """Returns dtype and shape of ``tensor``, of any shape, as text such as ``float32 (2, 3)``."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _options(part: Any) -> Iterable[tuple[str, Any]]:
    own = getattr(part, "__dict__", {})
    if not is_dataclass(part):
        return own.items()
    # A subclass from another package can have attributes that are not fields.
    named = {field.name for field in fields(part)}
    options = [(field.name, getattr(part, field.name)) for field in fields(part) if field.init]
    return [*options, *((name, value) for name, value in own.items() if name not in named)]


def _stable_text(value: Any) -> str:
    """Formats a value equally in all processes, unlike ``repr``, which shows addresses and unordered sets."""
    if value is None or isinstance(value, str | Number | torch.dtype):
        return repr(value) if isinstance(value, str) else str(value)
    if isinstance(value, Mapping):
        items = sorted(f"{_stable_text(key)}: {_stable_text(each)}" for key, each in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, Set):
        return "{" + ", ".join(sorted(map(_stable_text, value))) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_stable_text, value)) + "]"
    if is_dataclass(value):
        options = ", ".join(f"{name}={_stable_text(each)}" for name, each in _options(value))
        return f"{type(value).__name__}({options})"
    return type(value).__name__


# Keys of a state that exist only after the first measurement; if a state lacks them, measurements start again.
_OPTIONAL_KEYS = frozenset({"spread"})


def owner_of(method: Method, rank: int, workers: int, ranks_per_node: int = 1) -> dict[str, Any]:
    """Describes the worker and the method that a state belongs to.

    Args:
        method: Method that the state belongs to; its options may differ when the state is loaded.
        rank: Rank of the worker.
        workers: Number of workers.
        ranks_per_node: Number of workers that share a node and its state.

    Returns:
        Rank, world size and names of the parts, which are saved with the state; workers per node only if several.
    """
    parts = (method.compressor, method.communicator, method.residual, method.momentum)
    shared = {"ranks_per_node": ranks_per_node} if ranks_per_node > 1 else {}
    return {"rank": rank, "workers": workers, "parts": [type(part).__name__ for part in parts], **shared}


def check_owner(values: Mapping[str, Any], mine: Mapping[str, Any], holds: str) -> None:
    """Checks that a state was saved by the same rank, with the same world size and the same parts.

    Args:
        values: Saved state.
        mine: Expected owner, as described by ``owner_of``.
        holds: Key that only states of this kind of handle contain.

    Raises:
        ConfigError: If the state belongs to another worker, method or kind of handle.
    """
    saved = values.get("owner") if isinstance(values, Mapping) else None
    if isinstance(saved, Mapping) and (theirs := saved.get("ranks_per_node", 1)) != (
        own := mine.get("ranks_per_node", 1)
    ):
        raise ConfigError(
            f"this state was saved with ranks_per_node={theirs}, but this handle has ranks_per_node={own}; use the "
            "same value, since the workers of a node share a residual"
        )
    if saved is None or holds not in values or not isinstance(saved, Mapping) or saved.keys() != mine.keys():
        raise ConfigError("this is not the state of a handle of this kind; load the result of its state_dict()")
    check_whole(saved, mine, "owner")
    if not all(isinstance(part, str) for part in saved["parts"]):
        raise _invalid_state("owner.parts must contain only names of parts")
    if (saved["rank"], saved["workers"]) != (mine["rank"], mine["workers"]):
        raise ConfigError(
            f"this state belongs to rank {saved['rank']} of {saved['workers']}, but this is rank {mine['rank']} of "
            f"{mine['workers']}; save and load the state on every rank, with the same number of workers, since each "
            "rank has its own residual (in torch.distributed.checkpoint, save handle.sharded())"
        )
    if _stateful(saved["parts"]) != _stateful(mine["parts"]):
        raise ConfigError(
            f"this state belongs to the method {' + '.join(saved['parts'])}, but this method is "
            f"{' + '.join(mine['parts'])}; load it into the method that saved it"
        )


def _stateful(parts: Iterable[Any]) -> list[Any]:
    # Communicators that sum dense tensors have no state, so one may replace another.
    kinds = registry.communicators().values()
    dense = [kind.__name__ for kind in kinds if issubclass(kind, DenseCommunicator)]
    return [DenseCommunicator.__name__ if part in dense else part for part in parts]


def check_whole(saved: Any, mine: Any, path: str = "") -> None:
    """Checks that a saved state has all keys of the current one, at every level.

    Args:
        saved: Saved state, or a nested value of it.
        mine: Current state of this handle, or the nested value of it.
        path: Keys that lead to the nested value, for error messages.

    Raises:
        ConfigError: If a key is missing, or a value is not a mapping or list where it should be one.
    """
    if not isinstance(mine, Mapping | list):
        return
    wanted: Any = Mapping if isinstance(mine, Mapping) else (list, tuple)
    if not isinstance(saved, wanted):
        kind = "dict" if isinstance(mine, Mapping) else "list"
        raise _invalid_state(f"{path or 'it'} must be a {kind}, got {type(saved).__name__}")
    if isinstance(mine, list):
        for place, (theirs, own) in enumerate(zip(saved, mine, strict=False)):
            check_whole(theirs, own, f"{path}[{place}]")
        return
    for name, own in mine.items():
        inner = f"{path}.{name}".lstrip(".")
        if name not in saved and name in _OPTIONAL_KEYS:
            continue
        if name not in saved:
            raise _invalid_state(f"{inner} is missing")
        check_whole(saved[name], own, inner)


def _invalid_state(problem: str) -> ConfigError:
    return ConfigError(f"this state is invalid: {problem}; load the complete result of state_dict()")
