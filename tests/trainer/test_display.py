from __future__ import annotations

import io
import os
import pty
import re
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.driver import wait_until
from trainer.display import Eta, LineDisplay, TerminalDisplay, make_display
from trainer.observers import Observer

VALUES = {"epoch": 0.5, "loss": 1.23456, "seconds/compute": 0.03, "seconds/communicate": 0.01, "bytes/sent": 100.0}


class Clock:
    """Stands where ``time`` is imported."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr("trainer.display.time", fake)
    return fake


def left_after(eta: Eta, clock: Clock, seconds: list[float], first: int = 0, total: int = 100) -> list[str]:
    eta.begin(first)
    found = []
    for number, lasted in enumerate(seconds, first + 1):
        clock.now += lasted
        found.append(eta.left(number, total))
    return found


def test_time_left_is_the_mean_of_all_steps_but_the_first(clock: Clock) -> None:
    assert left_after(Eta(), clock, [50, 2, 2, 4, 0]) == ["-:--", "3:16", "3:14", "4:16", "3:10"]


def test_time_left_of_a_continued_run(clock: Clock) -> None:
    assert left_after(Eta(), clock, [9, 1, 1], first=60) == ["-:--", "0:38", "0:37"]


def test_an_evaluation_counts(clock: Clock) -> None:
    """In a run of ten steps with a second each, and four seconds of evaluation after each."""
    eta = Eta()
    eta.begin(0)
    for step in range(1, 6):
        clock.now += 1
        left = eta.left(step, 10)
        clock.now += 4
    assert left == "0:25"


def test_hours(clock: Clock) -> None:
    assert left_after(Eta(), clock, [1, 60], total=1000)[-1] == "16:38:00"


def test_lines(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    display = LineDisplay(interval=5.0)
    display.begin(0, 100)
    for step in range(1, 11):
        clock.now += 1
        display.step(step)
        display.metrics("train", step, VALUES)
    display.metrics("eval", 10, {"loss": 1.0, "accuracy": 0.5})
    display.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "training: step 0 of 100",
        "step 1/100  epoch 0.5  loss 1.235  40 ms/step (compute 75%, communicate 25%)  left -:--",
        "step 6/100  epoch 0.5  loss 1.235  40 ms/step (compute 75%, communicate 25%)  left 1:34",
        "step 10/100  eval: loss 1  accuracy 0.5  left 1:30",
    ]


def test_a_line_has_throughput_and_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    display = LineDisplay()
    display.begin(0, 10)
    display.metrics("train", 1, {"density": 0.01, "samples/second": 210.0, "seconds/total": 9.0, "bytes/total": 2.5e6})
    assert capsys.readouterr().out.splitlines()[-1] == (
        "step 1/10  density 0.01  samples/second 210  sent 2.5 MB  left -:--"
    )


def test_a_line_names_what_takes_long(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    display, said = LineDisplay(), list[str]()
    phases = {"building the model": True, "saving a checkpoint": False, None: False, "evaluating": True}
    for phase, is_long in phases.items():
        monkeypatch.setattr("trainer.display._LONG", 0.01 if is_long else 1000.0)
        display.phase(phase)
        if is_long:
            wait_until(lambda: said.append(capsys.readouterr().out) or f"{phase} ...\n" in "".join(said))  # noqa: B023
    display.close()
    assert "".join([*said, capsys.readouterr().out]).splitlines() == ["building the model ...", "evaluating ..."]


def test_lines_of_a_long_step_say_how_much_is_done(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.display._LONG", 10.0)
    display = LineDisplay()
    display.phase("first step, at least 44 s")
    for fraction in (0.05, 0.1, 0.15, 0.2, 0.25):
        clock.now += 4
        display.progress(fraction)
    display.close()
    assert capsys.readouterr().out.splitlines() == ["first step, at least 44 s: 15% after 0:12"]


def test_the_bar_names_what_takes_long_and_for_how_long(clock: Clock) -> None:
    display = TerminalDisplay(Console(file=io.StringIO(), force_terminal=True))
    shown = []

    def look() -> None:
        page = Console(file=io.StringIO(), width=100)
        with page.capture() as capture:
            page.print(display._progress.get_renderable())
        shown.append(re.sub(r"[^\x20-\x7e]", "", capture.get()).split(maxsplit=2)[1:])

    display.phase("building the model")
    clock.now += 72
    look()
    display.begin(0, 3)
    display.phase(None)
    look()
    display.step(1)
    display.phase("evaluating")
    clock.now += 5
    look()
    display.phase("first step")
    display.progress(0.273)
    clock.now += 7
    look()
    display.close()
    texts = [(step, text.strip()) for step, text in shown]
    assert texts == [
        ("0/?", "building the model 1:12"),
        ("0/3", "left -:--"),
        ("1/3", "evaluating 0:05"),
        ("1/3", "first step 27% 0:07"),
    ]


def show(display: Observer) -> None:
    display.begin(0, 3)
    for step in range(1, 4):
        display.step(step)
        display.metrics("train", step, VALUES)
    display.metrics("eval", 3, {"loss": 1.0, "accuracy": 0.5})
    display.close()


def test_no_control_characters_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    display = make_display()
    assert isinstance(display, LineDisplay)
    show(display)
    out = capfd.readouterr().out
    assert out.count("\n") == 3
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\x9b]", out)


@pytest.mark.parametrize("columns", ["120", "60"])
def test_a_pseudo_terminal(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real one: the bar moves, the evaluation stands above it, and the cursor comes back."""
    master, slave = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", columns)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    chunks: list[bytes] = []
    reader = threading.Thread(target=lambda: chunks.extend(iter(lambda: _read(master), b"")))
    reader.start()
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        display = make_display()
        assert isinstance(display, TerminalDisplay)
        show(display)
    reader.join()
    os.close(master)
    shown = b"".join(chunks).decode()
    assert "\x1b[?25l" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    assert "step 3  eval: loss 1  accuracy 0.5" in text
    assert "3/3" in text
    assert "loss 1.235" in text or columns == "60"
    assert all(len(line) <= int(columns) for line in re.split(r"[\r\n]+", text))
    assert "left -:--" in text


def test_a_bar_that_was_never_begun_can_be_closed() -> None:
    display = TerminalDisplay(Console(file=io.StringIO(), force_terminal=True))
    display.step(1)
    display.close()


def test_the_whole_command_under_a_pseudo_terminal(tmp_path: Path) -> None:
    from tests.support.driver import background_run

    master, slave = pty.openpty()

    def on_terminal() -> None:
        os.environ["TERM"] = "xterm"
        os.dup2(slave, 1)

    words = ("training.max_steps=3", "cluster.workers=2", f"output_dir={tmp_path / 'out'}")
    with background_run(*words, folder=tmp_path / "log", before=on_terminal) as run:
        os.close(slave)
        shown = b""
        while chunk := _read(master):
            shown += chunk
        assert run.wait() == 0
        assert run.stderr == ""
    os.close(master)
    assert b"\x1b[?25h" in shown
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    assert "3/3" in text
    assert "results: " in text


def _read(master: int) -> bytes:
    try:
        return os.read(master, 1 << 16)
    except OSError:  # the last writer has left
        return b""
