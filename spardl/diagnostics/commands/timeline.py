"""``spardl timeline``: predicts the time of a training step under every schedule."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import click

from spardl.basics.errors import ConfigError
from spardl.basics.files import write_atomically
from spardl.clusters.network import parse_network
from spardl.clusters.profile import Profile
from spardl.diagnostics.commands import network_option, workers_option
from spardl.diagnostics.timeline.measure import read_compression
from spardl.diagnostics.timeline.model import SCHEDULES, Kind, Lane, MethodCosts, Timeline
from spardl.method.method import Method
from spardl.method.recipes import make_method, method_names
from spardl.schedules.fusion import Linear

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw", "markdown", "parse_names", "timeline", "timeline_command"]


# Gantt chart of timelines: per schedule one bar for compute and one for the network, on a common time axis.


# Colours of Okabe and Ito, which are safe for colour-blind readers and differ in lightness.
COLOURS: Mapping[Kind, str] = MappingProxyType(
    {
        Kind.BACKWARD: "#0072B2",
        Kind.FORWARD: "#56B4E9",
        Kind.UPDATE: "#000000",
        Kind.COMPRESS: "#F0E442",
        Kind.SEND: "#D55E00",
        Kind.GATHER: "#CC79A7",
    }
)
NAMES: Mapping[Kind, str] = MappingProxyType(
    {
        Kind.BACKWARD: "backward",
        Kind.FORWARD: "next forward",
        Kind.UPDATE: "update",
        Kind.COMPRESS: "compress",
        Kind.SEND: "all-reduce, or its first half",
        Kind.GATHER: "second half",
    }
)
BAR = 0.4
# Offsets of the two bars of a schedule; the rows of schedules are 1 apart.
PLACES: Mapping[Lane, float] = MappingProxyType({Lane.COMPUTE: -BAR / 2, Lane.NETWORK: BAR / 2})
INCHES_PER_PAIR = 0.62
INCHES_AROUND = 1.35
# Bars below this share of the axis are drawn without an edge, which would hide them.
EDGE_SHARE = 0.004


def draw(timelines: Sequence[tuple[str, Timeline]], path: Path, title: str) -> None:
    """Draws one training step of each schedule, one below the other.

    Args:
        timelines: Name and timeline of each schedule.
        path: File to write; its suffix selects the format (.png, .svg, .pdf).
        title: Title of the figure.

    Raises:
        ConfigError: If there are no timelines, the format is not supported, or matplotlib is missing.
        OSError: If the file cannot be written.
    """
    try:
        # Imported here, because only pictures need it.
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError("a picture needs matplotlib; pip install 'spardl[report]'") from error
    if not timelines:
        raise ConfigError("no chosen schedule supports a chosen method, so there is nothing to draw; choose others")
    figure = Figure(figsize=(10, INCHES_AROUND + INCHES_PER_PAIR * len(timelines)), layout="constrained")
    formats = FigureCanvasAgg(figure).get_supported_filetypes()
    if path.suffix[1:] not in formats:
        raise ConfigError(f"{path} is not a supported picture format; use .png, .svg or .pdf")
    axes = figure.subplots()
    end = max(timeline.seconds for _, timeline in timelines)
    for row, (_, timeline) in enumerate(timelines):
        _draw_pair(axes, row, timeline, end)
    _label(axes, timelines, end, title)
    kinds = [kind for kind in Kind if any(span.kind is kind for _, timeline in timelines for span in timeline.spans)]
    bars = [axes.barh(0, 0, color=COLOURS[kind], label=NAMES[kind]) for kind in kinds]
    figure.legend(handles=bars, loc="outside lower center", ncols=len(kinds), frameon=False, fontsize=9)
    data = io.BytesIO()
    figure.savefig(data, format=path.suffix[1:], dpi=150)
    write_atomically(path, data.getvalue())


def _draw_pair(axes: Axes, row: int, timeline: Timeline, end: float) -> None:
    for kind, colour in COLOURS.items():
        bars = [(1e3 * span.start, 1e3 * (span.stop - span.start)) for span in timeline.spans if span.kind is kind]
        widths = [0.5 if length > 1e3 * EDGE_SHARE * end else 0.0 for _, length in bars]
        place = (row + PLACES[kind.lane] - BAR / 2, BAR)
        axes.broken_barh(bars, place, facecolors=colour, edgecolors="white", linewidths=widths or 0)
    axes.vlines(1e3 * timeline.seconds, row - BAR - 0.04, row + BAR + 0.04, colors="black", linewidth=1.5)
    axes.text(1e3 * (timeline.seconds + 0.006 * end), row, _milliseconds(timeline.seconds), va="center", fontsize=9)


def _label(axes: Axes, timelines: Sequence[tuple[str, Timeline]], end: float, title: str) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_xlabel("milliseconds from the start of the backward pass (above: compute, below: network)")
    axes.set_yticks(range(len(timelines)), [name for name, _ in timelines])
    axes.set_ylim(len(timelines) - 0.45, -0.55)
    axes.set_xlim(0, 1e3 * end * 1.09)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms" if seconds < 1 else f"{1e3 * seconds:,.0f} ms"


_EXAMPLES = """\b
Examples:
  spardl timeline model.json --workers 64 --network ethernet_10g
  spardl timeline model.json --compute 0.22 --schedules wfbp,dear --picture timeline.png
"""


def parse_names(text: str, known: Sequence[str], option: str) -> list[str]:
    """Splits a comma-separated list of names.

    Raises:
        ConfigError: If a name is unknown.
    """
    names = text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"{option} {unknown[0]} is unknown; choose from {', '.join(known)}")
    return names


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Formats rows as a Markdown table; the first row is the header."""
    header, *body = rows
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *body))


class _Prediction(NamedTuple):
    profile: str
    method: str
    schedule: str
    timeline: Timeline


def _predict(
    path: str, profile: Profile, costs: Mapping[str, MethodCosts], schedules: Sequence[str]
) -> tuple[str, list[_Prediction]]:
    """Returns the table of a profile, and its predictions."""
    rows, predictions = [["method", *schedules]], list[_Prediction]()
    for method, cost in costs.items():
        found = [(name, SCHEDULES[name](profile, cost)) for name in schedules]
        rows.append([method, *(f"{each.seconds:.4g}" if each else "-" for _, each in found)])
        # None: the method does not support the schedule.
        predictions += [_Prediction(path, method, name, each) for name, each in found if each]
    return markdown(rows), predictions


def _write_json(path: Path, predictions: Sequence[_Prediction], **setting: object) -> None:
    rows = [
        {"profile": each.profile, "method": each.method, "schedule": each.schedule, "seconds": each.timeline.seconds}
        for each in predictions
    ]
    write_atomically(path, f"{json.dumps({**setting, 'predictions': rows}, indent=1)}\n".encode())


def _draw(path: Path, predictions: Sequence[_Prediction], profiles: Sequence[str], title: str) -> None:
    models = [Path(each).stem for each in profiles]
    several = len(models) > 1  # then each row also names its profile
    named = [
        ("\n".join([*([Path(each.profile).stem] if several else []), f"{each.method}, {each.schedule}"]), each.timeline)
        for each in predictions
    ]
    draw(named, path, f"{', '.join(models)}, {title}")


def timeline_command(
    known: Sequence[str], make: Callable[[Sequence[str]], Mapping[str, Method]], methods: str
) -> click.Command:
    """Builds the command ``timeline`` for a set of methods.

    Args:
        known: Names of the methods that users can choose.
        make: Function that creates the methods with the given names.
        methods: Description of the accepted names, for the help text.
    """
    path = click.Path(path_type=Path, dir_okay=False)

    @click.command("timeline", epilog=_EXAMPLES)
    @click.argument("profiles", nargs=-1, required=True, type=path, metavar="PROFILE...")
    @workers_option
    @network_option
    @click.option("--methods", default="none,spardl", show_default=True, help=f"{methods}, separated by commas.")
    @click.option("--schedules", default=",".join(SCHEDULES), help=f"Some of {', '.join(SCHEDULES)} [all].")
    @click.option("--compute", type=float, help="Scale each profile to these seconds of the forward and backward pass.")
    @click.option("--compression", type=path, help="Times of compression, from scripts/bench.py compression [none].")
    @click.option("--picture", type=path, help="Draw all timelines to this file (.png, .svg, .pdf).")
    @click.option("--json", "json_file", type=path, help="Write the predictions to this file.")
    def command(
        profiles: tuple[Path, ...],
        workers: int,
        network: str,
        methods: str,
        schedules: str,
        compute: float | None,
        compression: Path | None,
        picture: Path | None,
        json_file: Path | None,
    ) -> None:
        """Predict the time of a training step under every schedule.

        Prints a table of seconds for each PROFILE, a file from spardl profile. The time of compression counts as 0
        unless --compression names a file.
        """
        names, chosen_methods = (
            parse_names(schedules, tuple(SCHEDULES), "--schedules"),
            parse_names(methods, known, "--methods"),
        )
        link, title = parse_network(network, "--network"), f"{workers} workers, {network}"
        lines = read_compression(compression, workers) if compression else {}
        read = {str(each): Profile.read(each) for each in profiles}
        if compute is not None:
            read = {each: profile.scaled(compute) for each, profile in read.items()}
        made, tables, predictions = make(chosen_methods), list[str](), list[_Prediction]()
        for each, profile in read.items():
            costs = {
                name: MethodCosts.of(method, workers, link, lines.get(name, Linear(0.0, 0.0)), profile.layout)
                for name, method in made.items()
            }
            table, found = _predict(each, profile, costs, names)
            tables.append(f"{each}, {title}: seconds per step\n\n{table}\n")
            predictions += found
        click.echo("\n".join(tables))  # after all predictions: an error prints no tables
        if json_file:
            _write_json(json_file, predictions, workers=workers, network=network)
        if picture:
            _draw(picture, predictions, list(read), title)

    return command


def _made(names: Sequence[str]) -> Mapping[str, Method]:
    return {name: make_method(name) for name in names}


timeline = timeline_command(method_names(), _made, "Names of spardl.method_names()")
