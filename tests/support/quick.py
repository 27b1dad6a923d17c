"""Long lists of cases that are alike: the README's command tries some of them, .ci/run all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["some_quick"]


def some_quick(cases: Iterable[Any], step: int) -> list[Any]:
    """Cases for ``parametrize``, of which all are slow but the first and each so-many-th after it.

    Args:
        cases: a tuple for several arguments.
        step: from one quick case to the next.
    """
    return [
        case
        if place % step == 0
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for place, case in enumerate(cases)
    ]
