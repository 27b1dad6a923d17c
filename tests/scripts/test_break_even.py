"""The tables of what wins where: from advice to cells, and what makes them."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import spardl
from scripts import break_even as tables
from spardl.clusters import Network
from spardl.clusters.profile import Profile
from spardl.diagnostics import Advice, Choice
from spardl.schedules.fusion import Linear
from tests.support.labs import ROOT


def advice(**seconds: float) -> Advice:
    """Methods that take so many seconds."""
    choices = [Choice(name, {}, "wfbp", taken, 0.0, 0.0) for name, taken in seconds.items()]
    ordered = tuple(sorted(choices, key=lambda choice: choice.seconds))
    return Advice(ordered, Network(0, 1), 4, 1000, 1.0, baseline=ordered[0])


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ({"none": 4.0, "bf16": 3.0, "topka": 2.0, "spardl": 1.0}, "4x spardl"),
        ({"none": 4.0, "bf16": 2.0, "spardl": 1.95}, "2x bf16"),
        ({"none": 4.0, "bf16": 5.0, "spardl": 3.9}, "dense"),
        ({"none": 4.0, "bf16": 5.0, "spardl": 3.8}, "1.05x spardl"),
        ({"none": 4.0, "bf16": 3.9, "spardl": 9.0}, "dense"),
    ],
)
def test_the_least_that_is_lost_for_a_clear_gain(seconds: dict[str, float], said: str) -> None:
    assert tables.winner(advice(**seconds)) == said


def profile() -> Profile:
    return Profile.read(ROOT / "scripts" / "profiles" / "resnet50.json").scaled(0.2)


def line(fixed: float, per_entry: float) -> Callable[[str, Mapping[str, Any]], Linear]:
    """Of sparse methods; a cast takes nothing."""
    return lambda name, options: Linear(0.0, 0.0) if name == "bf16" else Linear(fixed, per_entry)


@pytest.mark.slow
def test_below_the_break_even_bandwidth_a_sparse_method_wins() -> None:
    found = float(tables.break_even(profile(), 8, line(1e-3, 2e-9)))
    below, above = (
        tables.winner(tables.advise(profile(), Network(tables.ALPHA, gbit), 8, compressing=line(1e-3, 2e-9)))
        for gbit in (0.9 * found, 1.1 * found)
    )
    assert below.endswith(("spardl", "teams", "oktopk", "topka"))
    assert above.endswith(("dense", "bf16"))
    assert float(tables.break_even(profile(), 8, line(1e-3, 4e-9))) < found


def test_what_always_pays_and_what_never_does() -> None:
    assert tables.break_even(profile(), 8, line(1e9, 0.0)) == "never"
    assert tables.break_even(profile().scaled(1e-9), 8, line(0.0, 0.0)) == "400 and more"


def test_measured_times_are_used(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text(json.dumps({"workers": {"4": {"spardl, 2 teams": {"fixed": 1.0, "per_entry": 2.0}}}}))
    compressing = tables.measured(path)(4)
    assert compressing("spardl", {"density": 0.1, "teams": 2})(3) == 7.0
    with pytest.raises(spardl.SpardlError, match=r"times.json has no times of \(4, 'spardl'\); create it again"):
        compressing("spardl", {"teams": 1})
    path.write_text("[]")
    with pytest.raises(spardl.SpardlError, match=r"times.json contains no valid times .*--measure"):
        tables.measured(path)


def test_the_file_of_times_has_all_that_the_tables_ask_for() -> None:
    for workers in tables.WORKERS:
        found = tables.advise(profile(), 1, workers, compressing=tables.measured(tables.MEASURED)(workers))
        assert all(math.isfinite(choice.seconds) for choice in found.choices)


def test_what_a_gpu_is_assumed_to_take() -> None:
    line = tables.COMPRESSING["spardl"]
    for workers in (4, 64):
        seconds = tables.assumed(workers)("spardl", {"density": 0.01})
        assert seconds(1) == pytest.approx(line.start + workers * line.worker, rel=1e-3)
        assert seconds(10**6) - seconds(1) == pytest.approx(1e6 * line.entry, rel=0.05)
    assert tables.assumed(4)("bf16", {}) == tables.ASSUMED_CAST


def test_measuring_gives_what_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = iter([[3.0, 9.0, 9.0], [9.0, 4.0, 9.0], [9.0, 9.0, 6.0]] * 4)
    monkeypatch.setattr(tables, "WORKERS", (2,))
    monkeypatch.setattr(tables, "SIZES", (200, 400, 800))
    monkeypatch.setattr(tables, "measure_compression", lambda *arguments: (None, next(turns)))
    path = tmp_path / "times.json"
    monkeypatch.setattr(sys, "argv", ["break_even.py", "--measure", str(path)])
    assert tables.main() == 0
    assert "2 workers, spardl: Linear(" in capsys.readouterr().out
    compressing = tables.measured(path)(2)
    for name in ("bf16", "topka", "oktopk", "spardl"):
        # The least of three turns: 3, 4 and 6 s at 100, 200 and 400 entries.
        assert compressing(name, {})(1000) == pytest.approx(12.0)


def test_tables_are_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tables, "devices", lambda: ["a", "b"])
    monkeypatch.setattr(tables, "table", str.upper)
    monkeypatch.setattr(sys, "argv", ["break_even.py"])
    assert tables.main() == 0
    assert capsys.readouterr().out == "A\n\nB\n"
