"""The subcommands of ``spardl`` and the options that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from spardl.clusters.network import PRESETS

__all__ = ["network_option", "workers_option"]

F = TypeVar("F", bound=Callable[..., Any])


def network_option(command: F) -> F:
    """Adds the option ``--network`` (or ``--bandwidth``) to a command, which parses it with ``parse_network``."""
    return click.option(
        "--network",
        "--bandwidth",
        "network",
        default="1gbit",
        show_default=True,
        help=f"A bandwidth such as 1gbit, one of {', '.join(PRESETS)}, or a file from spardl doctor --out.",
    )(command)


def workers_option(command: F) -> F:
    """Adds the option ``--workers``, the number of workers to predict for, to a command."""
    return click.option(
        "--workers", type=click.IntRange(min=1), default=8, show_default=True, help="Number of workers."
    )(command)
