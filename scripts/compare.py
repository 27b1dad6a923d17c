"""Puts finished runs side by side: a table, and a picture of metric against time.

python scripts/compare.py outputs/*
python scripts/compare.py outputs/* --plot comparison.png
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import yaml


class Finished(NamedTuple):
    """A run that came to its end."""

    label: str
    simulated: bool
    summary: dict[str, Any]
    folder: Path


def read(folder: Path) -> Finished | None:
    """Reads a run folder; ``None`` if it is none, or not finished."""
    try:
        summary = json.loads((folder / "summary.json").read_text())
        config = yaml.safe_load((folder / "config.yaml").read_text())
    except (OSError, ValueError):
        return None
    if summary.get("status") != "finished":
        return None
    return Finished(_label(config), "network" in config["cluster"], summary, folder)


def _label(config: dict[str, Any]) -> str:
    """What distinguishes a method, in the words of its configuration."""
    parts = [config[node]["_target_"].rsplit(".", 1)[1] for node in ("compressor", "communicator", "residual")]
    options = {**config["compressor"], **config["communicator"]}
    values = [f"{key}={value}" for key, value in options.items() if key != "_target_"]
    return " ".join([" + ".join(parts), *values])


def table(runs: Sequence[Finished]) -> str:
    """A Markdown table, one row per method, over its seeds."""
    groups: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        groups[run.label].append(run.summary)
    lines = [
        "| method | runs | metric | test loss | last metric of each run | sent / dense | seconds |",
        "|" + "---|" * 7,
    ]
    for label, found in groups.items():
        metric = [summary["final"][summary["metric"]] for summary in found]
        cells = [
            label,
            str(len(found)),
            f"{found[0]['metric']} {_spread(metric)}",
            _spread([summary["final"]["loss"] for summary in found]),
            ", ".join(f"{value:.4f}" for value in metric),
            f"{mean(s['step_bytes'] / s['step_bytes_dense'] if s['step_bytes_dense'] else 1 for s in found):.2%}",
            _spread([summary["cluster_seconds"] for summary in found]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    return f"{mean(values):.4g}" + (f" +- {stdev(values):.2g}" if len(values) > 1 else "")


def plot(runs: Sequence[Finished], path: Path) -> None:
    """Draws each run's metric against the seconds of its cluster."""
    import matplotlib  # noqa: PLC0415 - only who asks for a picture needs it

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    colors: dict[str, str] = {}
    for run in runs:
        new = run.label not in colors
        colors.setdefault(run.label, f"C{len(colors)}")
        events = map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
        points = [(event["step"], event[run.summary["metric"]]) for event in events if event["kind"] == "eval"]
        pace = run.summary["cluster_seconds"] / run.summary["steps"]
        axes.plot(
            [step * pace for step, _ in points],
            [value for _, value in points],
            color=colors[run.label],
            alpha=0.8,
            label=run.label if new else None,
        )
    axes.set_xlabel("virtual seconds" if runs[0].simulated else "seconds")
    axes.set_ylabel(runs[0].summary["metric"])
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=130)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="run folders")
    parser.add_argument("--plot", type=Path, help="also draw a picture to this file")
    arguments = parser.parse_args()
    runs = [run for folder in arguments.folders if (run := read(folder))]
    if not runs:
        print("error: none of these folders holds a finished run", file=sys.stderr)
        return 2
    print(table(runs))
    if arguments.plot:
        plot(runs, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
