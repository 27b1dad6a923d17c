"""``training.profile=true``: a trace with the library's phases as named ranges."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from spardl.clusters.ledger import Ledger, Stopwatch
from spardl.protocol.programs import Phase
from tests.support.driver import composed, here, only_run, results
from trainer.experiment import experiment_id
from trainer.tracing import TRACE


def test_a_trace_names_the_phases_and_changes_no_result(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ("training.max_steps=5", "cluster.workers=2", "compressor=spardl", "training.eval_examples=8")
    for name in ("true", "false"):
        assert here(*words, f"training.profile={name}", f"output_dir={tmp_path / name}") == 0
    traced, plain = only_run(tmp_path / "true"), only_run(tmp_path / "false")
    assert results(traced) == results(plain)
    assert traced.name == plain.name
    assert not (plain / TRACE).exists()
    found = json.loads(gzip.decompress((traced / TRACE).read_bytes()))["traceEvents"]
    ranges = [event for event in found if str(event.get("name", "")).startswith("spardl.")]
    names = {event["name"] for event in ranges}
    assert names >= {f"spardl.{name}" for name in ("compute", "select", "pack", "communicate", "merge", "update")}
    assert sum(event["name"] == "spardl.compute" and event["ph"] == "X" for event in ranges) == 3
    assert not capfd.readouterr().err  # of the profiler itself


def test_the_id_does_not_depend_on_the_profile() -> None:
    assert experiment_id(composed(), 4) == experiment_id(composed("training.profile=true"), 4)


def test_ranges_are_entered_only_while_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Phase] = []

    class Named:
        def __exit__(self, *error: object) -> None:
            entered.pop()

    def enter(phase: Phase) -> Named:
        entered.append(phase)
        return Named()

    monkeypatch.setattr("spardl.clusters.ledger._entered", enter)
    ledger = Ledger()
    watch = Stopwatch(ledger)
    watch.switch(Phase.SELECT)
    assert entered == []
    ledger.traced = True
    watch.switch(Phase.PACK)
    assert entered == [Phase.PACK]
    watch.switch(Phase.MERGE)
    assert entered == [Phase.MERGE]
    watch.switch(None)
    assert entered == []
