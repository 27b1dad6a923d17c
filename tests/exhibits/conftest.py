"""What tests of exhibits have in common."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from scripts import choices


@pytest.fixture
def composing() -> Iterator[None]:
    """Choices of train.py can be composed while a test runs."""
    with choices.composing():
        yield
