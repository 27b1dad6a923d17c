"""Errors and warnings in one line, as they are shown to people."""

from __future__ import annotations

import sys
from contextlib import suppress

__all__ = ["first_line", "warn"]


def first_line(error: BaseException) -> str:
    """What an error says, without the stack that some libraries append; its type if it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def warn(line: str) -> None:
    """Prints a ``line`` that a run goes on after, also where nobody reads standard error any more."""
    with suppress(OSError):
        print(f"warning: {line}", file=sys.stderr, flush=True)
