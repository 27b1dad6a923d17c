"""``spardl timeline``: what a training step takes under every schedule."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from spardl.basics.errors import ConfigError
from spardl.basics.files import write_atomically
from spardl.clusters.network import parse_network
from spardl.clusters.profile import Profile
from spardl.diagnostics.commands import network_option, workers_option
from spardl.diagnostics.timeline.compressing import read_compression
from spardl.diagnostics.timeline.model import Timeline
from spardl.diagnostics.timeline.picture import draw
from spardl.diagnostics.timeline.schedules import SCHEDULES, MethodCosts
from spardl.method.method import Method
from spardl.method.recipes import make_method, method_names
from spardl.schedules.linear import Linear

__all__ = ["chosen", "markdown", "timeline", "timeline_command"]

_EXAMPLES = """\b
Examples:
  spardl timeline model.json --workers 64 --network ethernet_10g
  spardl timeline model.json --compute 0.22 --schedules wfbp,dear --picture timeline.png
"""


def chosen(text: str, known: Sequence[str], option: str) -> list[str]:
    """The names in a list with commas.

    Raises:
        ConfigError: if one is not known.
    """
    names = text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"{option} {unknown[0]} is unknown; choose from {', '.join(known)}")
    return names


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row is the header."""
    header, *body = rows
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *body))


@dataclass(frozen=True)
class _Options:
    """Of the command line."""

    profiles: tuple[Path, ...]
    workers: int
    network: str
    methods: str
    schedules: str
    compute: float | None
    compression: Path | None
    picture: Path | None
    json: Path | None


_Cases = dict[str, dict[str, dict[str, Timeline | None]]]


def _predict(options: _Options, make: Callable[[Sequence[str]], Mapping[str, Method]], known: Sequence[str]) -> _Cases:
    """The timelines by profile, method and schedule."""
    schedules = chosen(options.schedules, tuple(SCHEDULES), "--schedules")
    methods = chosen(options.methods, known, "--methods")
    network = parse_network(options.network, "--network")
    if options.workers < 1:
        raise ConfigError(f"--workers must be at least 1, got {options.workers}")
    lines = read_compression(options.compression, options.workers) if options.compression else {}
    profiles = [Profile.read(path) for path in options.profiles]
    if options.compute is not None:
        profiles = [profile.scaled(options.compute) for profile in profiles]
    made = make(methods)

    def cases(profile: Profile) -> dict[str, dict[str, Timeline | None]]:
        costs = {
            name: MethodCosts.of(method, options.workers, network, lines.get(name, Linear(0.0, 0.0)), profile.layout)
            for name, method in made.items()
        }
        return {method: {name: SCHEDULES[name](profile, cost) for name in schedules} for method, cost in costs.items()}

    return {str(path): cases(profile) for path, profile in zip(options.profiles, profiles, strict=True)}


def _report(options: _Options, found: _Cases) -> None:
    """Prints tables, and writes what else was asked for."""
    title = f"{options.workers} workers, {options.network}"
    for path, cases in found.items():
        click.echo(f"{path}, {title}: seconds of an iteration\n\n{_table(cases, options.schedules.split(','))}\n")
    every = {
        (path, method, name): timeline
        for path, cases in found.items()
        for method, row in cases.items()
        for name, timeline in row.items()
        if timeline
    }
    if options.json:
        rows = [
            {"profile": path, "method": method, "schedule": name, "seconds": timeline.seconds}
            for (path, method, name), timeline in every.items()
        ]
        plain = {"workers": options.workers, "network": options.network, "predictions": rows}
        write_atomically(options.json, f"{json.dumps(plain, indent=1)}\n".encode())
    if options.picture:
        several = len(found) > 1
        named = [
            ("\n".join([*([Path(path).stem] if several else []), f"{method}, {name}"]), timeline)
            for (path, method, name), timeline in every.items()
        ]
        models = ", ".join(Path(path).stem for path in found)
        draw(named, options.picture, f"{models}, {title}")


def _table(cases: Mapping[str, Mapping[str, Timeline | None]], schedules: Sequence[str]) -> str:
    """Seconds of an iteration, one row for each method."""
    rows = [[method, *(_cell(found[name]) for name in schedules)] for method, found in cases.items()]
    return markdown([["method", *schedules], *rows])


def _cell(timeline: Timeline | None) -> str:
    return f"{timeline.seconds:.4g}" if timeline else "-"


def timeline_command(
    known: Sequence[str], make: Callable[[Sequence[str]], Mapping[str, Method]], methods: str
) -> click.Command:
    """The command, for these methods.

    Args:
        known: their names.
        make: makes some of them.
        methods: what their names are, for the help.
    """
    path = click.Path(path_type=Path, dir_okay=False)

    @click.command("timeline", epilog=_EXAMPLES)
    @click.argument("profiles", nargs=-1, required=True, type=path, metavar="PROFILE...")
    @workers_option
    @network_option
    @click.option("--methods", default="none,spardl", show_default=True, help=f"{methods}, with commas.")
    @click.option("--schedules", default=",".join(SCHEDULES), help=f"Some of {', '.join(SCHEDULES)} [all].")
    @click.option("--compute", type=float, help="Scale each profile to so many seconds, forward and backward.")
    @click.option("--compression", type=path, help="Times of compressing, by scripts/compression.py [none].")
    @click.option("--picture", type=path, help="Draw all timelines to this file (.png, .svg, .pdf).")
    @click.option("--json", type=path, help="Write the predictions to this file.")
    def command(**given: Any) -> None:
        """Predict what a training step takes under every schedule.

        Prints a table of seconds for each PROFILE, a file by spardl profile. What compressing takes is left out unless
        --compression names a file.
        """
        options = _Options(**given)
        _report(options, _predict(options, make, known))

    return command


def _made(names: Sequence[str]) -> Mapping[str, Method]:
    return {name: make_method(name) for name in names}


timeline = timeline_command(method_names(), _made, "Names of spardl.method_names()")
