"""Advice follows the cost model, and the bandwidth at which methods break even."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spardl
from scripts.exhibits.records import on_record
from spardl.basics.errors import ConfigError
from spardl.clusters import Network
from spardl.clusters.profile import Profile
from spardl.diagnostics import Advice, Choice
from spardl.diagnostics.advice import KEPT_GAIN, measured_compression
from spardl.diagnostics.timeline.model import MethodCosts, in_backward
from spardl.schedules.fusion import Linear, by_size
from tests.support.labs import ROOT


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compressing takes 1 ms and 2 ns for each entry, whatever the method."""
    line = Linear(1e-3, 2e-9)
    monkeypatch.setattr("spardl.diagnostics.advice.measure_compression", lambda *arguments: (line, []))


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(500, 500) for _ in range(4)))


def test_compression_pays_on_slow_networks_only() -> None:
    slow, fast = spardl.advise(model(), "100mbit", 8), spardl.advise(model(), 1000, 8)
    assert slow.best.options["density"] == 0.01
    assert fast.best.method == "none"
    assert slow.best.seconds < slow.dense.seconds / 5
    assert [choice.seconds for choice in slow.choices] == sorted(choice.seconds for choice in slow.choices)
    assert slow.entries == sum(parameter.numel() for parameter in model().parameters())


def test_dense_seconds_are_those_of_a_ring() -> None:
    network = Network(alpha=1e-4, gbit=2)
    advice = spardl.advise(model(), network, 4)
    assert advice.dense.seconds == pytest.approx(6 * 1e-4 + 1.5 * 4 * advice.entries * network.beta)
    assert advice.dense.bytes_sent == pytest.approx(6 * advice.entries)
    (half,) = (choice for choice in advice.choices if choice.method == "bf16")
    assert half.bytes_sent == pytest.approx(advice.dense.bytes_sent / 2)


def test_dense_and_sparse_are_equal_at_break_even() -> None:
    for choice in spardl.advise(model(), Network(0, 1), 4).choices:
        if choice.method != "none":
            there = spardl.advise(model(), Network(0, choice.break_even_gbit), 4)
            again = next(other for other in there.choices if other[:2] == choice[:2])
            assert again.seconds == pytest.approx(there.dense.seconds, rel=1e-6)


def test_compression_time_of_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spardl.diagnostics.advice.measure_compression", None)
    asked = []

    def compressing(name: str, options: Mapping[str, Any]) -> Callable[[int], float]:
        asked.append((name, options.get("teams")))
        return lambda entries: 5.0

    advice = spardl.advise(model(), "1gbit", 4, compressing=compressing)
    assert asked == [
        ("bf16", None),
        ("powersgd", None),
        ("topka", None),
        ("oktopk", None),
        ("spardl", 1),
        ("spardl", 2),
    ]
    assert advice.best.method == "none"
    assert all(5 < choice.seconds < 6 for choice in advice.choices[1:])


def test_computation_hides_messages() -> None:
    alone, known = spardl.advise(model(), 1), spardl.advise(model(), 1, compute_seconds=1.0)
    assert (alone.compute, known.compute) == (0.0, pytest.approx(1.0))
    assert 1.0 <= known.dense.seconds < 1.0 + alone.dense.seconds
    assert "communication alone" in str(alone)
    assert "1000 ms of computation" in str(known)


def test_measuring_does_not_change_the_model() -> None:
    made, batch = model(), torch.randn(2, 500)
    before = [parameter.detach().clone() for parameter in made.parameters()]
    advice = spardl.advise(made, loss=lambda: made(batch).square().mean())
    assert advice.compute > 0
    assert all(torch.equal(one, other) for one, other in zip(made.parameters(), before, strict=True))
    assert all(parameter.grad is None for parameter in made.parameters())


def test_invalid_model_or_loss_is_rejected() -> None:
    made, batch = nn.Linear(4, 4), torch.ones(2, 4)
    calls = (
        ("model.json", None, r"model must be a module or a Profile \(Profile.read\(path\)\), got a str"),
        (made, made(batch).sum(), "loss must be a function that runs one forward pass, such as .*, got a Tensor"),
        (made, lambda: None, "the loss must be a scalar tensor that depends on the model, got a NoneType"),
        (made, lambda: made(batch), r"a scalar tensor that depends on the model, got a tensor of shape \(2, 4\)"),
        (made, batch.sum, r"depends on the model, got a tensor of shape \(\)"),
    )
    for given, loss, said in calls:
        with pytest.raises(ConfigError, match=said):
            spardl.advise(given, "1gbit", workers=2, loss=loss)  # type: ignore[arg-type]


def test_nonfinite_gradient_leaves_model_unchanged() -> None:
    """The loss is 0 here, and its gradient 0/0: even a rate of 0 would make weights of it that are no numbers."""
    made, batch = nn.Linear(4, 4), torch.randn(2, 4)
    with pytest.raises(ConfigError, match="a gradient of the profiled model is not finite; check its inputs"):
        spardl.advise(made, "1gbit", workers=2, loss=lambda: (made(batch) * 0).square().sum().sqrt())
    assert all(parameter.isfinite().all() for parameter in made.parameters())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("1 apple",), "bandwidth=1 apple is not a network; use ethernet_1g, .*, a bandwidth such as 1gbit"),
        (("0gbit",), "bandwidth=0gbit is not a network"),
        ((-1,), "gbit=-1 is not a network; set alpha >= 0"),
        (("1gbit", 8, {"methods": ["none", "foo"]}), "methods must be one or more of none, bf16, .*, spardl, got foo"),
        (("1gbit", 8, {"methods": []}), "methods must be one or more of none, bf16, .*, spardl, got an empty list"),
        (("1gbit", 8, {"schedules": ["foo"]}), "schedules must be one or more of after_backward, .*, got foo"),
        (("1gbit", 8, {"schedules": ["dear"]}), "powersgd supports none of the schedules dear; add another schedule"),
        (("1gbit", 1), "workers must be an integer, at least 2, got 1"),
    ],
)
def test_bad_input(arguments: tuple[Any, ...], said: str) -> None:
    bandwidth, workers, options = (*arguments, 8, {})[:3] if len(arguments) == 1 else (*arguments, {})[:3]
    with pytest.raises(ConfigError, match=said):
        spardl.advise(model(), bandwidth, workers, **options)


def test_it_is_compared_with_plain_ddp() -> None:
    """Which sends what is dense in buckets of 25 MB, each when it is there."""
    profile = Profile.read(ROOT / "scripts" / "profiles" / "resnet50.json").scaled(0.22)
    network = Network(1e-4, 10)
    advice = spardl.advise(profile, network, 8)
    costs = MethodCosts.of(spardl.make_method("none"), 8, network, Linear(0.0, 0.0))
    groups = by_size(profile.entries, 25 * (1 << 20) // 4)
    assert advice.baseline[:3] == ("none", {}, "wfbp")
    assert advice.baseline.seconds == in_backward(profile, groups, costs.whole).seconds
    assert advice.dense.seconds < advice.baseline.seconds
    assert str(advice).count("plain DDP  ") == 1
    assert f"use {advice.advised.call}, " in str(advice)


def test_schedules_are_those_of_attach() -> None:
    profile = Profile.read(ROOT / "scripts" / "profiles" / "resnet50.json").scaled(0.22)
    found = {choice.schedule for choice in spardl.advise(profile, 10, 8).choices}
    assert found <= {"wfbp", "mg_wfbp", "layer_fusion", "dear"}
    assert len(found) > 1
    (one,) = {choice.schedule for choice in spardl.advise(profile, 10, 8, schedules=["after_backward"]).choices}
    assert one == "after_backward"


@pytest.mark.parametrize(
    ("seconds", "method", "said"),
    [
        (1.0, "topka", 'use spardl.attach(model, "topka", schedule="wfbp"), 2.0 times as fast as plain DDP'),
        (1.9, "topka", 'use spardl.attach(model, "topka", schedule="wfbp"), 5% faster than plain DDP'),
        (1.95, "topka", 'keep plain DDP; spardl.attach(model, "topka", schedule="wfbp") is only 3% faster'),
        (1.999, "topka", 'keep plain DDP; spardl.attach(model, "topka", schedule="wfbp") is as fast as plain DDP'),
        (2.0, "none", "keep plain DDP; no method is faster"),
    ],
)
def test_small_gains_are_not_recommended(seconds: float, method: str, said: str) -> None:
    plain = Choice("none", {}, "wfbp", 2.0, 1e6, 0.0)
    best = Choice(method, {}, "wfbp", seconds, plain.bytes_sent, 0.0)
    text = str(Advice((best, plain), Network(0, 1), 4, 1000, 1.0, baseline=plain))
    assert said in text
    assert " 1 times" not in text


@pytest.mark.parametrize(("seconds", "advised"), [(1.0, "topka"), (0.96, "bf16")])
def test_method_that_learns_like_dense_is_preferred(seconds: float, advised: str) -> None:
    plain = Choice("none", {}, "wfbp", 2.0, 1e6, 0.0)
    cast = Choice("bf16", {}, "wfbp", seconds, 5e5, 0.0)
    sparse = Choice("topka", {"density": 0.002}, "wfbp", 0.95, 1e4, 0.0, local_update=True)
    ordered = tuple(sorted([cast, sparse, plain], key=lambda choice: choice.seconds))
    advice = Advice(ordered, Network(0, 1), 4, 1000, 1.0, baseline=plain)
    assert (advice.best, advice.advised.method) == (sparse, advised)
    learning = [line for line in str(advice).splitlines() if "learning:" in line]
    if advised == "bf16":
        assert not learning
        equal = '  preferred: the loss of "bf16" equals that of dense training within the noise of seeds'
        assert f'{equal} (docs/tables/learning.md); "topka" is faster by at most 5%' in str(advice)
        assert 'use spardl.attach(model, "bf16", schedule="wfbp"), 2.1 times' in str(advice)
    else:
        assert "preferred:" not in str(advice)
        assert learning == [
            "  learning: at density=0.002 an entry is sent every 500 steps on average; in a training of fewer than "
            '5,000 steps, compare the loss with that of "bf16"'
        ]
        assert 'use spardl.attach(model, "topka", density=0.002, schedule="wfbp", optimizer=optimizer), ' in str(advice)


@pytest.mark.parametrize(("compute", "every"), [(1.0, 9), (1.9, None), (0.0, None)])
def test_recommended_number_of_local_steps(compute: float, every: int | None) -> None:
    """0.45 s of an exchange are a 20th of 9 s; 1.95 s of a step that computes for 1.9 s wait for less."""
    plain = Choice("none", {}, "wfbp", 3.0, 1e6, 0.0, exchange=2.0)
    sparse = Choice("topka", {"density": 0.01}, "wfbp", 1.95, 1e4, 0.0, exchange=0.45)
    advice = Advice((sparse, plain), Network(0, 1), 4, 1000, compute, baseline=plain)
    assert advice.every == every
    lines = [line for line in str(advice).splitlines() if "local steps:" in line]
    said = (
        "  local steps: 49% of such a step waits for the network, but only 5% of the computation with "
        'spardl.Outer(..., "topka", density=0.01, every=9); the same number of examples then teaches less: '
        "with dense exchanges, 22% (every=15) or 3% (every=30) of the gain of 8 workers over a single one remained in "
        "900 steps of a GPT of 0.2 M parameters (one seed; docs/tables/learning.md, Local steps)"
    )
    assert lines == ([said] if every else [])


def test_the_price_of_local_steps_is_that_on_record() -> None:
    rows = [
        record
        for command, record in on_record(ROOT / "docs/results/learning.jsonl").items()
        if "max_steps=900" in command
    ]

    def loss(words: str) -> float:
        (found,) = (each.final("loss") for each in rows if words in each.command and "seed=1" in each.command)
        return found

    common = "lr_schedule.warmup_fraction=0.1 compressor=none"
    dense, alone = loss(f"{common} optimizer.lr"), loss(f"{common} cluster.workers=1")
    for every, share in KEPT_GAIN.items():
        local = loss(f"{common} schedule=diloco schedule.every={every} ")
        assert round((alone - local) / (alone - dense), 2) == share


def test_an_exchange_is_a_synchronization_of_all_entries_alone() -> None:
    network = Network(alpha=1e-4, gbit=2)
    dense = spardl.advise(model(), network, 4, compute_seconds=0.01).dense
    assert dense.exchange == pytest.approx(6 * 1e-4 + 1.5 * 4 * 1_002_000 * network.beta)
    assert dense.seconds < 0.01 + dense.exchange


def test_powersgd_is_compared_where_shapes_are_known() -> None:
    """By what it sends of this model: rank times rows and columns of each matrix, and the vectors."""
    advice = spardl.advise(model(), 1, 4)
    (found,) = (choice for choice in advice.choices if choice.method == "powersgd")
    assert found.bytes_sent == pytest.approx(4 * 2 * 3 / 4 * 4 * (4 * (500 + 500) + 500), rel=1e-3)
    assert not advice.left_out
    profile = Profile.read(ROOT / "scripts" / "profiles" / "resnet20.json")
    assert "powersgd" in {choice.method for choice in spardl.advise(profile, 1, 4).choices}
    without = replace(profile, layers=tuple(replace(layer, shapes=()) for layer in profile.layers))
    with pytest.raises(ConfigError, match=r"none of the methods can be compared \(powersgd"):
        spardl.advise(without, 1, 4, methods=["powersgd"])
    unknown = spardl.advise(without, 1, 4)
    assert "powersgd" not in {choice.method for choice in unknown.choices}
    assert str(unknown).splitlines()[-1].startswith("  not compared: powersgd compresses matrices, but the profile has")


def test_ranges_span_the_repetitions(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks, lines = iter(range(1000)), iter(Linear(seconds, 0.0) for seconds in (3.0, 1.0, 2.0) * 10)
    monkeypatch.setattr("spardl.diagnostics.advice.measure_compression", lambda *arguments: (next(lines), []))
    found = measured_compression(4, torch.device("cpu"), clock=lambda: 1.2 * next(ticks))
    advice = spardl.advise(model(), "1gbit", 4, compressing=found, methods=["none", "topka"])
    (topka,) = (choice for choice in advice.choices if choice.method == "topka")
    assert topka.between is not None
    low, high = topka.between
    assert (high - low, topka.seconds - low) == (pytest.approx(2.0), pytest.approx(1.0))
    assert topka.pays_between is not None
    assert topka.pays_between[0] < topka.break_even_gbit < topka.pays_between[1]
    assert "1000 to 3000 ms " in str(advice)
    assert "  ranges: minimum and maximum over repeated measurements" in str(advice)
    assert next(lines) == Linear(3.0, 0.0)  # the clock ended the measurement after three repetitions


def test_a_gain_is_a_range_of_two_digits() -> None:
    plain = Choice("none", {}, "wfbp", 2.0, 1e6, 0.0)
    for between, said in (((0.5, 1.0), "2.0 to 4.0 times as fast as"), ((0.7, 1.9), "5% to 186% faster than")):
        best = Choice("topka", {}, "wfbp", 0.9, 1e5, 0.0, between=between)
        text = str(Advice((best, plain), Network(0, 1), 4, 1000, 1.0, baseline=plain))
        assert f'schedule="wfbp"), {said} plain DDP' in text


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    def script(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from spardl.diagnostics.cli import main; main()", "advise", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)

    done = script("scripts/profiles/resnet20.json", "--bandwidth", "100mbit", "--workers", "4")
    assert done.returncode == 0, done.stderr
    assert " parameters, 4 workers, 0.1 Gbit/s, " in done.stdout
    assert len(done.stdout.splitlines()) >= 6
    assert "measuring spardl, density=0.01, teams=2 (6 of 6) ... " in done.stderr
    bad = script("nowhere.json")
    assert (bad.returncode, len(bad.stderr.splitlines())) == (2, 1)
