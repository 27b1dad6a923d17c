"""The alpha-beta model of a network: a message of m bytes takes alpha + beta * m seconds."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from spardl.basics.checks import is_number
from spardl.basics.errors import ConfigError
from spardl.basics.files import RECORD_BYTES, bounded_yaml, read_text

__all__ = ["LATENCY", "PRESETS", "Network", "network_text", "parse_bandwidth", "parse_network"]

_KEYS = {"alpha", "gbit"}
# Optional key of a file, for readers only: when, where and how the two values were measured.
_REMARK = "measured"
LATENCY = 50e-6
"""Latency in seconds that is assumed when only a bandwidth is given: typical of TCP over Ethernet."""
_UNITS: Mapping[str, float] = MappingProxyType({"kbit": 1e-6, "mbit": 1e-3, "gbit": 1.0})


@dataclass(frozen=True)
class Network:
    """Identical full-duplex links between all workers.

    Args:
        alpha: Latency of a message in seconds.
        gbit: Bandwidth of a link in Gbit/s.

    Raises:
        ConfigError: If the latency is negative, or the bandwidth is not positive.

    Example:
        >>> network = spardl.clusters.Network(alpha=50e-6, gbit=1)
        >>> print(f"a message of a million bytes takes {1e3 * (network.alpha + 1e6 * network.beta):.2f} ms")
        a message of a million bytes takes 8.05 ms
    """

    alpha: float
    gbit: float

    def __post_init__(self) -> None:
        numbers = is_number(float, self.alpha) and is_number(float, self.gbit)
        if not numbers or not 0 <= self.alpha < math.inf or not self.gbit > 0:
            raise ConfigError(
                f"alpha={self.alpha}, gbit={self.gbit} is not a network; set alpha >= 0 (seconds) and gbit > 0 (Gbit/s)"
            )

    @property
    def beta(self) -> float:
        """Transfer time in seconds per byte."""
        return 8e-9 / self.gbit


PRESETS: Mapping[str, Network] = MappingProxyType(
    {
        "ethernet_1g": Network(alpha=50e-6, gbit=1),
        "ethernet_10g": Network(alpha=30e-6, gbit=10),
        "ethernet_25g": Network(alpha=20e-6, gbit=25),
        "ethernet_100g": Network(alpha=15e-6, gbit=100),
        "infiniband_100g": Network(alpha=2e-6, gbit=100),
    }
)
"""Networks by name. The latencies are typical of TCP over Ethernet and of RDMA over InfiniBand; ``spardl doctor``
measures a real network."""


def parse_network(value: str | Mapping[str, float], key: str = "cluster.network") -> Network:
    """Makes a network from a preset name, a bandwidth (``1gbit``), a file, or ``{alpha: seconds, gbit: Gbit/s}``.

    A file is JSON or YAML with the two keys ``alpha`` and ``gbit``, and optionally the key ``measured``, which holds a
    comment; ``network_text`` creates such content. A preset or a bandwidth takes precedence over a file of the same
    name. With a bandwidth, the latency is 50 us.

    Args:
        value: Description of the network, from the configuration or the command line.
        key: Name of the option, for error messages.

    Returns:
        The network.

    Raises:
        ConfigError: If the name, the file or a key is unknown, or a value is out of range.

    Example:
        >>> from spardl.clusters import parse_network
        >>> parse_network("ethernet_10g")
        Network(alpha=3e-05, gbit=10)
    """
    if isinstance(value, str):
        return PRESETS.get(value) or parse_bandwidth(value) or _read(Path(value), key)
    if not isinstance(value, Mapping) or set(value) != _KEYS:
        raise ConfigError(f"{key}={value!r} is not a network; use a preset, a file path, or the keys alpha and gbit")
    return _make(value, key)


def parse_bandwidth(text: str) -> Network | None:
    """Parses a bandwidth such as ``1gbit``, ``2.5 Gbit/s`` or ``100mbit``.

    Args:
        text: Positive number and unit: kbit, mbit or gbit, with or without ``/s``.

    Returns:
        A network with a latency of 50 us, or ``None`` if the text is not a bandwidth.
    """
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+) *([kmg]bit)(?:/s)?", text.strip().lower())
    return Network(LATENCY, float(found[1]) * _UNITS[found[2]]) if found and float(found[1]) else None


def network_text(network: Network, measured: Mapping[str, str | float]) -> str:
    """Returns the content of a network file that ``parse_network`` reads.

    Args:
        network: Network, whose numbers are written with five significant digits.
        measured: Facts on the measurement (when, where, how) by name; the file contains one line for each.
    """
    # JSON is also YAML, and writing it needs no dependency.
    numbers = {name: float(f"{number:.5g}") for name, number in (("alpha", network.alpha), ("gbit", network.gbit))}
    return json.dumps({**numbers, **({_REMARK: dict(measured)} if measured else {})}, indent=2) + "\n"


def _make(content: Mapping[str, Any], where: str) -> Network:
    try:
        return Network(alpha=content["alpha"], gbit=content["gbit"])
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _read(path: Path, key: str) -> Network:
    where = f"{key}={path}"
    try:
        text = read_text(path, RECORD_BYTES) if path.is_file() else None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where} cannot be read ({error}); create one with spardl doctor --out") from error
    if text is None:
        raise ConfigError(
            f"{where} is not a network; use {', '.join(PRESETS)}, a bandwidth such as 1gbit, "
            "'{alpha: SECONDS, gbit: GBIT_PER_SECOND}', or a file from spardl doctor --out"
        )
    content = _load(text, where)
    if not isinstance(content, Mapping) or not _KEYS <= set(content) <= _KEYS | {_REMARK}:
        shape = ", ".join(map(str, content)) if isinstance(content, Mapping) else f"a {type(content).__name__}"
        raise ConfigError(f"{where} contains {shape}; it must contain alpha and gbit, and optionally {_REMARK}")
    return _make({name: _number(content[name]) for name in _KEYS}, where)


def _load(text: str, where: str) -> Any:
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    try:
        # Optional: the core library reads JSON only; the extra "train" installs PyYAML.
        import yaml  # type: ignore[import-untyped, unused-ignore]  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"{where} is not JSON, and YAML needs PyYAML; pip install 'spardl[train]'") from error
    try:
        return yaml.safe_load(bounded_yaml(text))
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{where} is not YAML: {' '.join(str(error).split())}") from error


def _number(value: Any) -> Any:
    # YAML parses 5e-5 as a string, because it has no decimal point.
    if isinstance(value, str):
        with suppress(ValueError):
            return float(value)
    return value
