"""Whether all workers were given the same, asked before the first gradient is sent.

The size of a message follows from what both sides know, so workers that know different things break one another's
connections, or wait for what never comes. What they compare here is of one size whatever they were given: a digest.
Only where digests differ do they exchange the rest, and each of them can say what differs.
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
from spardl.communicators.steps.bruck import all_gather
from spardl.method.method import Method
from spardl.protocol.programs import Program, Worker, whole_team

__all__ = ["compare", "compare_if_told", "facts_of", "first_difference", "kind_of", "shapes_of"]


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
