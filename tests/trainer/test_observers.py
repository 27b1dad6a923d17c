from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.measuring import undisturbed
from tests.trainer.toy import Notebook
from trainer.observers import BackgroundObserver, Bounded, Guarded, MetricsFile, Observer, attempt
from trainer.runs import Run


def tell_all(observer: Observer) -> None:
    observer.begin(0, 2)
    observer.step(1)
    observer.metrics("train", 1, {"loss": 0.5})
    observer.end({"steps": 2})
    observer.close()


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    """Other tests fork this process."""
    yield
    until = time.monotonic() + 60
    while threading.active_count() > 1 and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() == 1


EVERYTHING = [("begin", 0, 2), ("step", 1), ("train", 1, {"loss": 0.5}), ("end",), ("close",)]


@pytest.mark.parametrize("wrap", [lambda make: Guarded(make, "x"), lambda make: Bounded(make, 5.0), BackgroundObserver])
def test_wrappers_pass_everything_on(wrap: Callable[[Callable[[], Observer]], Observer]) -> None:
    book = Notebook()
    tell_all(wrap(lambda: book))
    assert book.reported == EVERYTHING


def test_an_observer_reacts_to_nothing_by_itself() -> None:
    tell_all(Observer())


class Breaking(Notebook):
    def __init__(self, event: str, action: Callable[[], Any]) -> None:
        super().__init__()
        self._event, self._action = event, action

    def __getattribute__(self, name: str) -> Any:
        if name in ("begin", "step", "metrics", "end", "close") and name == self._event:
            return lambda *arguments: self._action()
        return super().__getattribute__(name)


def fail() -> None:
    raise ValueError("broken\nin two lines")


@pytest.mark.parametrize("event", ["begin", "step", "metrics", "end", "close"])
def test_a_failed_observer_is_disabled(event: str, capsys: pytest.CaptureFixture[str]) -> None:
    book = Breaking(event, fail)
    tell_all(Guarded(lambda: book, "the thing"))
    assert capsys.readouterr().err == "warning: the thing failed and is now disabled: broken\n"
    names = ["begin", "step", "metrics", "end", "close"]
    assert len(book.reported) == names.index(event)


def test_an_observer_that_cannot_be_made(capsys: pytest.CaptureFixture[str]) -> None:
    def make() -> Observer:
        raise ImportError("no such thing")

    tell_all(Guarded(make, "the thing"))
    assert capsys.readouterr().err == "warning: the thing failed and is now disabled: no such thing\n"


def test_rich_exits_without_a_reader(capsys: pytest.CaptureFixture[str]) -> None:
    def leave() -> None:
        raise SystemExit(1)

    assert not attempt(leave, "the display")
    assert attempt(lambda: None, "the display")
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("event", ["begin", "step", "metrics", "end", "close"])
def test_a_hanging_observer_times_out(event: str, capsys: pytest.CaptureFixture[str]) -> None:
    hang = threading.Event()

    def reported() -> float:
        began = time.monotonic()
        tell_all(Guarded(lambda: Bounded(lambda: Breaking(event, hang.wait), 0.05), "the thing"))
        seconds = time.monotonic() - began
        assert "the thing failed and is now disabled: no answer within 0." in capsys.readouterr().err
        return seconds

    undisturbed(reported, lambda seconds: seconds < 2)
    hang.set()


def test_building_an_observer_times_out() -> None:
    hang = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.15 seconds"):
        Bounded(lambda: Breaking("", hang.wait) if hang.wait() else Observer(), 0.05)
    hang.set()


def test_background_observer_receives_earlier_events() -> None:
    made, book = threading.Event(), Notebook()

    def make() -> Observer:
        assert made.wait(60)
        return book

    observer = BackgroundObserver(make)
    observer.begin(0, 2)
    observer.step(1)
    assert book.reported == []
    made.set()
    observer.close()
    assert book.reported == [("begin", 0, 2), ("step", 1), ("close",)]


def test_errors_cross_the_thread() -> None:
    with pytest.raises(ValueError, match="broken"):
        Bounded(lambda: Breaking("step", fail), 5.0).step(1)

    def timeout() -> None:
        raise TimeoutError("of its own")

    with pytest.raises(TimeoutError, match="of its own"):
        Bounded(lambda: Breaking("step", timeout), 5.0).step(1)


def test_the_metrics_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.begin(0, 4)
    file.metrics("train", 1, {"loss": 0.5})
    file.metrics("eval", 2, {"loss": 0.25})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"kind": "train", "step": 1, "loss": 0.5},
        {"kind": "eval", "step": 2, "loss": 0.25},
    ]


def test_the_metrics_file_drops_repeated_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for step in (2, 4, 6):
        file.metrics("train", step, {"loss": step})
    with path.open("ab") as broken:
        broken.write(b'{"kind": "train", "st\xff')
    MetricsFile(path).begin(4, 8)
    file.metrics("train", 6, {"loss": 7})
    assert [json.loads(line)["loss"] for line in path.read_text().splitlines()] == [2, 4, 7]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_metrics_become_null(bad: float, tmp_path: Path) -> None:
    """JSON has no NaN: other readers than Python's would refuse the whole line."""
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path).metrics("eval", 2, {"loss": 0.25, "perplexity": bad})
    assert path.read_text() == '{"kind": "eval", "step": 2, "loss": 0.25, "perplexity": null}\n'
    run = Run("abc", tmp_path)
    run.write_summary({"final": {"loss": bad}, "caveats": ("text", bad), "best": None, "steps": 3})
    assert "NaN" not in run.summary_file.read_text()
    assert "Infinity" not in run.summary_file.read_text()
    assert run.read_summary() == {"final": {"loss": None}, "caveats": ["text", None], "best": None, "steps": 3}
