"""Programs of scripts/ run in this process, because starting one takes seconds."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import pytest


class Done(NamedTuple):
    code: int
    out: str
    err: str


Program: TypeAlias = Callable[..., Done]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    """Runs ``main`` of a program by name; returns its exit code and what it printed."""

    def run(name: str, *words: object) -> Done:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, words)])
        capsys.readouterr()
        code = importlib.import_module(f"scripts.{name}").main()
        return Done(code, *capsys.readouterr())

    return run
