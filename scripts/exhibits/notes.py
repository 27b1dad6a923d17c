"""What must be said of a method wherever it is compared."""

from __future__ import annotations

__all__ = ["OKTOPK"]

OKTOPK = (
    "Ok-Topk has two additions of this library, which change its words and seconds: thresholds that go astray are "
    "found ahead of time (reevaluate_beyond), and no selection has more than 4k/3."
)
