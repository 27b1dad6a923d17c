"""Which edition of its parts a run has, where a part once gave other results for the same configuration.

A run's id says what was asked for. Where code changes on purpose what comes of it, the part's edition is raised here,
so that results of before are told from those of today without giving every run another id. A test does small work anew
and fails where results changed and no edition did (tests/exhibits/test_versions.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from spardl.training.targets import public

__all__ = ["editions"]

_RAISED: Mapping[str, int] = MappingProxyType(
    {
        # Measuring layers no longer draws from the random numbers that dropout uses.
        "spardl.LayerFusion": 2,
        "spardl.MgWfbp": 2,
    }
)


def editions(config: Mapping[str, Any]) -> dict[str, int]:
    """The editions of a resolved configuration's parts, by public name; without those that have only had one."""
    return {name: _RAISED[name] for name in sorted(set(_targets(public(config)))) if name in _RAISED}


def _targets(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        if isinstance(name := node.get("_target_"), str):
            yield name
        for value in node.values():
            yield from _targets(value)
    elif isinstance(node, Sequence) and not isinstance(node, str):
        for value in node:
            yield from _targets(value)
