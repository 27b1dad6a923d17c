"""The subcommands of ``spardl``, and the options that several of them share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from spardl.clusters.network import PRESETS

__all__ = ["network_option", "workers_option"]

F = TypeVar("F", bound=Callable[..., Any])


def network_option(command: F) -> F:
    """``--network``, also as ``--bandwidth``; read it with ``parse_network``."""
    return click.option(
        "--network",
        "--bandwidth",
        "network",
        default="1gbit",
        show_default=True,
        help=f"A bandwidth like 1gbit, one of {', '.join(PRESETS)}, or a file by spardl doctor --out.",
    )(command)


def workers_option(command: F) -> F:
    """``--workers`` of a cluster that is predicted."""
    return click.option("--workers", type=int, default=8, show_default=True)(command)
