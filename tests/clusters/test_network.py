"""The alpha-beta model."""

from __future__ import annotations

import pytest

from spardl.clusters import PRESETS, Network, parse_network
from spardl.errors import ConfigError


def test_presets_are_ordered_by_bandwidth() -> None:
    assert parse_network("ethernet_1g").beta == pytest.approx(8e-9)
    assert parse_network("ethernet_10g").beta == pytest.approx(8e-10)
    assert PRESETS["infiniband_100g"].alpha < PRESETS["ethernet_100g"].alpha


def test_own_values() -> None:
    assert parse_network({"alpha": 1e-3, "gbit": 0.5}) == Network(alpha=1e-3, gbit=0.5)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("token_ring", "cluster.network=token_ring is unknown; use ethernet_1g,"),
        ({"alpha": 1.0}, "the keys alpha and gbit, got {'alpha': 1.0}"),
        (5, "a preset's name, or the keys alpha and gbit, got 5"),
        ({"alpha": "fast", "gbit": 1}, "alpha=fast"),
        ({"alpha": -1.0, "gbit": 1}, "cluster.network: a network needs alpha >= 0"),
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
        ("x", "cluster.throttle=x is unknown"),
        (5, "cluster.throttle needs"),
        ({"alpha": -1, "gbit": 1}, "throttle: a net"),
    ],
)
def test_messages_name_the_key(value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_network(value, "cluster.throttle")  # type: ignore[arg-type]
