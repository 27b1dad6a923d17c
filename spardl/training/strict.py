"""JSON as its standard has it, which every reader takes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

__all__ = ["to_json"]


def to_json(content: Any, indent: int | None = None) -> str:
    """A text in strict JSON: ``null`` stands for a NaN and for an infinity, which JSON does not have."""
    return json.dumps(_without_gaps(content), indent=indent, allow_nan=False)


def _without_gaps(content: Any) -> Any:
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: _without_gaps(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_without_gaps(value) for value in content]
    return content
