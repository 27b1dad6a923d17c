"""Fixtures of tests of GPU kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.vector.kernels.gpu_worker import Call, worker


@pytest.fixture(scope="module")
def call() -> Iterator[Call]:
    """Runs functions in a process with Triton's interpreter, which also has the kernels of the CPU."""
    with worker(needs_cpu=True) as function:
        yield function
