"""Networks, the ledger, and costs of a step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from spardl.basics.errors import ConfigError
from spardl.clusters import PRESETS, Ledger, Network, parse_network
from spardl.clusters.network import network_text
from spardl.clusters.profile import StepCosts, break_even_gbit, gather_costs
from spardl.protocol.programs import Exchange, Phase, Receive, Send
from tests.trainer.toy import simulated


def test_presets_are_ordered_by_bandwidth() -> None:
    assert parse_network("ethernet_1g").beta == pytest.approx(8e-9)
    assert parse_network("ethernet_10g").beta == pytest.approx(8e-10)
    assert PRESETS["infiniband_100g"].alpha < PRESETS["ethernet_100g"].alpha


def test_a_bandwidth_is_a_network() -> None:
    assert parse_network("1gbit") == Network(alpha=50e-6, gbit=1)
    assert parse_network(" 2.5 Gbit/s ") == Network(alpha=50e-6, gbit=2.5)
    assert parse_network("100mbit", "cluster.throttle").gbit == pytest.approx(0.1)
    for text in ("0gbit", "1 apple", "1.2.3gbit", "gbit", "-1gbit"):
        with pytest.raises(ConfigError, match=f"cluster.network={text} is not a network; use .* such as 1gbit"):
            parse_network(text)


def test_own_values() -> None:
    assert parse_network({"alpha": 1e-3, "gbit": 0.5}) == Network(alpha=1e-3, gbit=0.5)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("token_ring", "cluster.network=token_ring is not a network; use ethernet_1g,"),
        ({"alpha": 1.0}, "={'alpha': 1.0} is not a network; use a preset, a file path, or the keys alpha and gbit"),
        (5, "=5 is not a network"),
        ({"alpha": "fast", "gbit": 1}, "alpha=fast"),
        ({"alpha": -1.0, "gbit": 1}, "cluster.network: alpha=-1.0, gbit=1 is not a network"),
        ({"alpha": float("inf"), "gbit": 1}, "alpha=inf"),
        ({"alpha": float("nan"), "gbit": 1}, "alpha=nan"),
        ({"alpha": 0.0, "gbit": 0}, "gbit > 0"),
        ({"alpha": 0.0, "gbit": float("nan")}, "gbit=nan"),
    ],
)
def test_bad_values(value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_network(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("x", "cluster.throttle=x is not a network"),
        (5, "cluster.throttle=5 is not"),
        ({"alpha": -1, "gbit": 1}, "throttle: alpha=-1"),
    ],
)
def test_messages_name_the_key(value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_network(value, "cluster.throttle")  # type: ignore[arg-type]


def test_a_file(tmp_path: Path) -> None:
    file = tmp_path / "network.yaml"
    file.write_text(network_text(Network(alpha=5e-5, gbit=0.9375), {"when": "today: #1", "workers": 4}))
    assert parse_network(str(file)) == Network(alpha=5e-5, gbit=0.9375)
    assert yaml.safe_load(file.read_text())["measured"] == {"when": "today: #1", "workers": 4}
    file.write_text(network_text(Network(alpha=0, gbit=123456.7), {}))
    assert parse_network(str(file)) == Network(alpha=0, gbit=123460)


def test_a_file_by_hand(tmp_path: Path) -> None:
    """5e-5 is a text to YAML, and 10 an integer."""
    file = tmp_path / "mine"
    file.write_text("# ours\ngbit: 10\nalpha: 5e-5\n")
    assert parse_network(str(file), "cluster.throttle") == Network(alpha=5e-5, gbit=10)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "contains a NoneType; it must contain alpha and gbit, and optionally measured"),
        ("[1, 2]", "contains a list"),
        ("alpha: 1", "contains alpha"),
        ("{alpha: 1, gbit: 1, beta: 2}", "contains alpha, gbit, beta"),
        ("{alpha: fast, gbit: 1}", "f: alpha=fast, gbit=1 is not a network"),
        ("{alpha: 1, gbit: 0}", "gbit > 0"),
        ("{alpha: .nan, gbit: 1}", "alpha=nan"),
        ("{alpha: true, gbit: 1}", "alpha=True"),
        ("alpha: [", "f is not YAML: while parsing"),
        ("!!python/object/apply:os.getcwd []", "is not YAML: could not determine a constructor"),
        (b"\xff\xfe\x00\x81", "f cannot be read .*'utf-8' codec"),
    ],
)
def test_bad_files(text: str | bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message) as caught:
        parse_network(str(file), "--throttle")
    assert str(caught.value).startswith(f"--throttle={file}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["nowhere/network.yaml", ".", "", "a\0b", "n" * 5000])
def test_missing_network_files(name: str) -> None:
    with pytest.raises(ConfigError, match=r"spardl doctor --out"):
        parse_network(name)


def test_presets_take_precedence_over_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ethernet_1g").write_text("{alpha: 1, gbit: 1}")
    assert parse_network("ethernet_1g") == PRESETS["ethernet_1g"]


def test_without_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_text("{alpha: 1, gbit: 1}")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match=r"pip install 'spardl\[train\]'"):
        parse_network(str(tmp_path / "f"))
    (tmp_path / "f").write_text(network_text(Network(alpha=5e-5, gbit=2), {"workers": 4}))
    assert parse_network(str(tmp_path / "f")) == Network(alpha=5e-5, gbit=2)


def test_counts_and_round_trip() -> None:
    ledger = Ledger()
    sends = [Send(1, torch.zeros(4, dtype=torch.uint8), 2), Send(2, torch.zeros(0), 0)]
    ledger.count_exchange(Exchange(sends, [Receive(1, 3, torch.float64)]))
    ledger.count_collective(rounds=6, elements=12, itemsize=4)
    ledger.seconds[Phase.PACK] += 0.5
    assert (ledger.rounds, ledger.messages, ledger.words) == (7, 7, 14)
    assert (ledger.bytes_sent, ledger.bytes_received) == (52, 72)
    copy = Ledger()
    copy.load_state_dict(ledger.state_dict())
    assert copy == ledger


def costs(**changes: Any) -> StepCosts:
    seconds = dict.fromkeys((phase.value for phase in Phase), 0.0)
    hidden = seconds | {Phase.MERGE.value: 0.003, Phase.COMMUNICATE.value: 1.0}
    seconds |= {Phase.SELECT.value: 0.001, Phase.PACK.value: 0.002, Phase.MERGE.value: 0.002}
    values = {"rounds": 1.0, "words": 1.0, "bytes_sent": 1e6, "dense_bytes": 9e6, "peak_memory": 0.0}
    return StepCosts(seconds=seconds, overlapped=hidden, **{**values, **changes})


def test_the_break_even_bandwidth_by_hand() -> None:
    """8 MB saved in 8 ms: a gigabyte per second, 8 Gbit/s."""
    assert break_even_gbit(costs()) == pytest.approx(8.0)


def test_nothing_saved() -> None:
    assert break_even_gbit(costs(bytes_sent=9e6)) is None
    assert break_even_gbit(costs(dense_bytes=0.0, bytes_sent=0.0)) is None


def test_costs_are_means_over_steps_and_workers() -> None:
    cluster = simulated(4)
    for rank, ledger in enumerate(cluster.ledgers):
        ledger.rounds, ledger.words, ledger.bytes_sent = 6, 100 * rank, 800 * rank
        ledger.seconds[Phase.COMPUTE] = 2.0 * rank
        ledger.spend(Phase.COMMUNICATE, 4.0 * rank, overlapped=True)
    found = gather_costs(cluster, 3, torch.zeros(10))
    assert (found.rounds, found.words, found.bytes_sent) == (2, 50, 400)
    assert found.seconds["compute"] == 1.0
    assert (found.seconds["communicate"], found.overlapped["communicate"]) == (0.0, 2.0)
    assert found.dense_bytes == 2 * 40 * 3 / 4
    assert found.peak_memory > 1e6
