"""Error messages of calls that must fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from spardl.basics.errors import ConfigError

__all__ = ["refusals"]


def refusals(calls: Iterable[Callable[[], Any]]) -> list[str]:
    """Returns the message of the ConfigError that each of the calls must raise."""
    said = []
    for call in calls:
        with pytest.raises(ConfigError) as error:
            call()
        said.append(str(error.value))
    return said
