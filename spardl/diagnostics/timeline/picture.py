"""Timelines as a Gantt chart: for each schedule one bar of compute and one of the network, on a common time axis."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from spardl.basics.errors import ConfigError
from spardl.basics.files import write_atomically
from spardl.diagnostics.timeline.model import Kind, Lane, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

# Okabe and Ito's colours, which colour-blind readers can tell apart; they differ in lightness, too.
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
# Of a pair; the next pair begins at the next whole number.
PLACES: Mapping[Lane, float] = MappingProxyType({Lane.COMPUTE: -BAR / 2, Lane.NETWORK: BAR / 2})
INCHES_PER_PAIR = 0.62
INCHES_AROUND = 1.35
# A smaller share of the axis is no room for the edge between two bars.
EDGE_SHARE = 0.004


def draw(timelines: Sequence[tuple[str, Timeline]], path: Path, title: str) -> None:
    """Draws one period of each schedule below the other.

    Args:
        timelines: their names, and what is drawn.
        path: the picture; its ending is the format (.png, .svg, .pdf).
        title: what all have in common.

    Raises:
        ConfigError: if there is nothing to draw, no such format, or matplotlib is missing.
        OSError: if the file cannot be written.
    """
    try:
        # Only who asks for a picture needs it.
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError("a picture needs matplotlib; install it with: pip install 'spardl[report]'") from error
    if not timelines:
        raise ConfigError("a picture needs at least one timeline")
    figure = Figure(figsize=(10, INCHES_AROUND + INCHES_PER_PAIR * len(timelines)), layout="constrained")
    formats = FigureCanvasAgg(figure).get_supported_filetypes()
    if path.suffix[1:] not in formats:
        raise ConfigError(f"{path}: no picture can be written with this ending; use .png, .svg or .pdf")
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
