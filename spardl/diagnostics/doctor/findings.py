"""What a check found, in one line, and whether anything failed."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import Enum

__all__ = ["Findings", "Verdict"]


class Verdict(Enum):
    """How good news is; the text stands in front of the line."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "FAILED"


@dataclass
class Findings:
    """All lines so far.

    Attributes:
        speaks: whether this process prints: one does.
        failures: how many checks failed.
    """

    speaks: bool
    failures: int = field(default=0, init=False)

    def ok(self, text: str) -> None:
        """What is as it should be, and where."""
        self._tell(Verdict.OK, text)

    def warn(self, text: str) -> None:
        """What works, but not well: what, where, the fix."""
        self._tell(Verdict.WARNING, text)

    def fail(self, text: str) -> None:
        """What does not work: what, where, the fix."""
        self.failures += 1
        self._tell(Verdict.FAILED, text)

    def judge(self, good: bool, text: str, fix: str) -> None:
        """What is either right or has failed."""
        if good:
            self.ok(text)
        else:
            self.fail(f"{text}; {fix}")

    def progress(self, text: str) -> None:
        """What comes next, to stderr: it may take a while."""
        if self.speaks:
            print(text, file=sys.stderr, flush=True)

    def show(self, lines: list[str]) -> None:
        """More than a line can hold, under the line before."""
        if self.speaks:
            print("\n".join(f"{'':<9}{line}" for line in lines), flush=True)

    def _tell(self, verdict: Verdict, text: str) -> None:
        if self.speaks:
            print(f"{verdict.value:<9}{' '.join(text.split())}", flush=True)
