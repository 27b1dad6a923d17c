"""The alpha-beta model of a network: a message of m bytes takes alpha + beta * m seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from spardl.checks import is_a
from spardl.errors import ConfigError

__all__ = ["PRESETS", "Network", "parse_network"]


@dataclass(frozen=True)
class Network:
    """Links that are all alike, each full duplex.

    Args:
        alpha: seconds that a message takes to start.
        gbit: bandwidth of a link in Gbit/s.

    Raises:
        ConfigError: if a value is negative, or the bandwidth zero.
    """

    alpha: float
    gbit: float

    def __post_init__(self) -> None:
        numbers = is_a(float, self.alpha) and is_a(float, self.gbit)
        if not numbers or not 0 <= self.alpha < math.inf or not self.gbit > 0:
            raise ConfigError(
                f"a network needs alpha >= 0 (seconds) and gbit > 0, got alpha={self.alpha}, gbit={self.gbit}"
            )

    @property
    def beta(self) -> float:
        """Seconds per byte."""
        return 8e-9 / self.gbit


# The latencies are typical of TCP over Ethernet and of RDMA over InfiniBand; measure your own to be exact.
PRESETS: Mapping[str, Network] = MappingProxyType(
    {
        "ethernet_1g": Network(alpha=50e-6, gbit=1),
        "ethernet_10g": Network(alpha=30e-6, gbit=10),
        "ethernet_25g": Network(alpha=20e-6, gbit=25),
        "ethernet_100g": Network(alpha=15e-6, gbit=100),
        "infiniband_100g": Network(alpha=2e-6, gbit=100),
    }
)


def parse_network(value: str | Mapping[str, float], key: str = "cluster.network") -> Network:
    """Reads a preset's name, or ``{alpha: seconds, gbit: Gbit/s}``.

    Args:
        value: what was configured.
        key: where, for messages.

    Raises:
        ConfigError: if the name or the keys are unknown, or a value is out of range.
    """
    if isinstance(value, str):
        if value not in PRESETS:
            raise ConfigError(
                f"{key}={value} is unknown; use {', '.join(PRESETS)}, or '{{alpha: SECONDS, gbit: GBIT_PER_SECOND}}'"
            )
        return PRESETS[value]
    if not isinstance(value, Mapping) or set(value) != {"alpha", "gbit"}:
        raise ConfigError(f"{key} needs a preset's name, or the keys alpha and gbit, got {value!r}")
    try:
        return Network(alpha=value["alpha"], gbit=value["gbit"])
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
