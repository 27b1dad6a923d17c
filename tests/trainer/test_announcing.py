from __future__ import annotations

import io
import itertools
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.driver import wait_until
from trainer import display
from trainer.display import show_activity


def others() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "spardl-announcing"]


def test_short_activities_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with show_activity("preparing the data"):
        assert others()
    assert capsys.readouterr().out == ""
    assert not others()  # this process may be forked


def test_long_activities_are_printed_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(display, "_LONG", 0.05)
    said: list[str] = []
    with show_activity("preparing the data"):
        wait_until(lambda: said.append(capsys.readouterr().out) or "".join(said))
        time.sleep(0.2)
    assert "".join(said) + capsys.readouterr().out == "preparing the data ...\n"
    with show_activity("preparing the data", quiet=True):
        time.sleep(0.1)
    assert capsys.readouterr().out == ""


def test_an_error_ends_it() -> None:
    with pytest.raises(ValueError, match="no data"), show_activity("preparing the data"):
        raise ValueError("no data")
    assert not others()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_an_activity_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, looks = Terminal(), itertools.chain([100.0], itertools.count(100.3))
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr(display, "time", SimpleNamespace(perf_counter=lambda: next(looks)))
    with show_activity("preparing the data"):
        wait_until(lambda: "0:01" in terminal.getvalue())
    shown = terminal.getvalue().split("\r\x1b[K")
    assert shown[0] == shown[-1] == ""  # the line is empty again
    assert shown[1:3] == ["preparing the data 0:00", "preparing the data 0:01"]
    soon: Any = Terminal()
    monkeypatch.setattr("sys.stdout", soon)
    with show_activity("preparing the data"):
        pass
    assert soon.getvalue() == ""
