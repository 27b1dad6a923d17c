"""What calls are refused with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from spardl.basics.errors import ConfigError

__all__ = ["refusals"]


def refusals(calls: Iterable[Callable[[], Any]]) -> list[str]:
    """What each of some calls says as it raises a ConfigError, as each must."""
    said = []
    for call in calls:
        with pytest.raises(ConfigError) as error:
            call()
        said.append(str(error.value))
    return said
