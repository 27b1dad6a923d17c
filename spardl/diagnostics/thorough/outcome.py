"""What a thorough check is told, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from spardl.diagnostics.doctor.findings import Verdict

__all__ = ["Outcome", "Place", "failed", "judged", "ok", "plain", "warned"]


@dataclass(frozen=True)
class Place:
    """Where a check runs.

    Attributes:
        device: ``cuda``, or ``cpu`` where there is no GPU: with what takes a GPU made smaller, and Triton interpreted.
        timeout: seconds that bound every wait for another worker.
        seconds: what the check may take; those that measure do so less often if time is short.
    """

    device: str
    timeout: float
    seconds: float

    @property
    def on_gpu(self) -> bool:
        """Whether this is the real thing."""
        return self.device == "cuda"

    @property
    def torch_device(self) -> torch.device:
        """The device; all workers of this machine share the first GPU."""
        return torch.device("cuda", 0) if self.on_gpu else torch.device("cpu")


@dataclass(frozen=True)
class Outcome:
    """What came of a check.

    Attributes:
        verdict: how good that is.
        text: what, where and, unless all is well, the fix: one line.
        figures: all that was measured; plain data.
    """

    verdict: Verdict
    text: str
    figures: Mapping[str, Any]


def ok(text: str, figures: Mapping[str, Any]) -> Outcome:
    """All is well."""
    return Outcome(Verdict.OK, text, figures)


def warned(text: str, figures: Mapping[str, Any]) -> Outcome:
    """It works, but not well."""
    return Outcome(Verdict.WARNING, text, figures)


def failed(text: str, figures: Mapping[str, Any]) -> Outcome:
    """It does not work."""
    return Outcome(Verdict.FAILED, text, figures)


def judged(good: str, problems: list[str], fix: str, figures: Mapping[str, Any]) -> Outcome:
    """All is well unless there are problems, the first of which is told with their number."""
    if not problems:
        return ok(good, figures)
    more = f", and {len(problems) - 1} more like this" if problems[1:] else ""
    return failed(f"{problems[0]}{more}; {fix}", {**figures, "problems": problems})


def plain(value: Any) -> Any:
    """Data that JSON has a form for: numbers that are none become text."""
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
