"""Base classes of communicators."""

from __future__ import annotations

from typing import Any

import pytest

from spardl.communicators import SparDL


def test_reduce_with_earlier_arguments_is_an_error() -> None:
    """One line at the definition of the class, instead of a missing argument in the first step."""

    def reduce(self: SparDL, context: Any, accumulated: Any, compressor: Any, compression: Any, state: Any) -> Any:
        raise NotImplementedError

    message = r"^Earlier\.reduce has the arguments of an earlier version; define reduce\(self, sync\)"
    with pytest.raises(TypeError, match=message):
        type("Earlier", (SparDL,), {"reduce": reduce})
