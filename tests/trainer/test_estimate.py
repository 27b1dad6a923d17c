"""The estimate before the first step: for large models only, and without an effect on the training."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.driver import here, only_run, results
from trainer.estimate import Estimate, tracking
from trainer.memory import Need

NEED = Need(1_000_000_000, 500_000_000, 1_000_000_000, 500_000_000)


def test_the_line_names_time_and_memory() -> None:
    found = Estimate(25.2, 2, 4, NEED)
    assert found.text == (
        "estimate: at least 25 s a step (forward and backward passes), 4 x 3 GB and activations, 50 s for 2 steps"
    )
    assert found.first == "first step, at least 25 s"
    assert "7:30 min for 30 steps" in Estimate(15.0, 30, 1, NEED).text
    assert "8.3 hours for 1000 steps" in Estimate(30.0, 1000, 1, NEED).text


def test_the_progress_of_a_step_counts_both_passes() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(4, 4))
    reported: list[float] = []
    with tracking(model, 2, reported.append):
        for _ in range(2):
            loss = model(torch.ones(1, 4)).sum()
            before = reported[-1]
            loss.backward()
    assert reported == sorted(reported)
    assert reported[-1] == 1.0
    assert before == pytest.approx(0.5 + 1 / 6, abs=0.01)
    model(torch.ones(1, 4)).sum().backward()
    assert reported[-1] == 1.0
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    "words",
    [
        ("cluster=simulated", "cluster.workers=2"),
        # Its rows follow a text and carry a state.
        pytest.param(
            (
                *("model=lstm_ptb", "dataset=synthetic_tokens", "dataset.vocab_size=200", "dataset.tokens=20000"),
                *("model.hidden_size=12", "model.embedding_size=12", "task.seq_len=8", "cluster.workers=2"),
            ),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_estimate_changes_no_result(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    short = ("training.max_steps=3", "training.eval_examples=8", *words)
    assert here(*short, f"output_dir={tmp_path / 'without'}") == 0
    assert "estimate:" not in capfd.readouterr().out
    monkeypatch.setattr("trainer.estimate._PARAMETERS", 0)
    assert here(*short, f"output_dir={tmp_path / 'with'}") == 0
    out = capfd.readouterr().out
    line = (
        r"estimate: at least \S+ s a step \(forward and backward passes\), [12] x \S+ GB and activations, \S+ s for 3"
    )
    assert re.search(rf"\n{line} steps\n", out)
    assert results(only_run(tmp_path / "with")) == results(only_run(tmp_path / "without"))
