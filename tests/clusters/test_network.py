"""The alpha-beta model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from spardl.basics.errors import ConfigError
from spardl.clusters import PRESETS, Network, parse_network
from spardl.clusters.network import network_text


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
