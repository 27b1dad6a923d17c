"""Which parts make a method: declared in the file of one of them, by name, since most parts are in other files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Combination"]


@dataclass(frozen=True)
class Combination:
    """A method by name. A compressor's or a communicator's file lists those that it brings as ``METHODS``.

    Args:
        name: of the method, for ``spardl.attach(model, "NAME")`` and ``train.py compressor=NAME``.
        compressor: what one worker sends, by name, like the other parts.
        communicator: how the sent is added up.
        residual: where the rest goes.
        momentum: what is compressed.
        dense_steps: synchronizations that are dense at first.
        compressor_options: those that differ from the compressor's own defaults.
        communicator_options: those that differ from the communicator's own defaults.
        faster: another communicator, which adds up in an order of its own; handles use it unless they are given one.
    """

    name: str
    compressor: str
    communicator: str
    residual: str
    momentum: str = "optimizer"
    dense_steps: int = 0
    compressor_options: Mapping[str, Any] = field(default_factory=dict)
    communicator_options: Mapping[str, Any] = field(default_factory=dict)
    faster: str | None = None
