"""What all tests share."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "spardl", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("spardl")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Processes are forked in some tests, which no other thread would survive."""
    torch.set_num_threads(1)
