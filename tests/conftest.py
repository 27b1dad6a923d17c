"""What all tests share."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

# As train.py sets it: torch reads it once, when it is imported, and tests fork their runs from this process.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

import pytest
import torch
from hypothesis import HealthCheck, settings

from trainer import display

# A script that starts tests with & makes them deaf to Ctrl-C, and with them all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# nohup makes them ignore SIGHUP, and runs keep an ignored SIGHUP.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

settings.register_profile(
    "spardl", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("spardl")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Processes are forked in some tests, which no other thread would survive."""
    torch.set_num_threads(1)


@pytest.fixture
def composing() -> Iterator[None]:
    """Choices of train.py can be composed while a test runs."""
    from scripts import choices

    with choices.composing():
        yield


@pytest.fixture(autouse=True, scope="session")
def patience() -> Iterator[None]:
    """On a busy machine everything takes long, and tests that compare what is printed would find it said."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(display, "_LONG", 1000.0)
        yield


@pytest.fixture(autouse=True, scope="session")
def pace() -> Iterator[None]:
    """Niced processes would hardly progress next to other tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "nice", lambda _: 0)
        yield


@atexit.register
def _quiet_the_leaks() -> None:
    """Triton's bindings list hundreds of leaks of their own when Python has ended; registered first, this runs last."""
    if "triton" in sys.modules:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


@pytest.hookimpl(trylast=True)  # when those that are not asked for are gone
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begins with files of tests that may take long, then those of many tests: workers end at about the same time."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    usual = float(config.getini("timeout"))

    def place(tests: list[pytest.Item]) -> tuple[float, int]:
        marks = [mark for test in tests if (mark := test.get_closest_marker("timeout"))]
        return -max([usual, *(float(mark.args[0]) for mark in marks)]), -len(tests)

    items[:] = [test for tests in sorted(files.values(), key=place) for test in tests]


def pytest_collection_finish() -> None:
    """What is imported by now stays: the garbage collector, a tenth of the tests' time, need not look at it again."""
    gc.freeze()
