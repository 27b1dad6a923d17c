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
from statistics import mean
from typing import Any, NamedTuple

import yaml
from exhibits.statistics import spread

COLUMNS = ("method", "metric", "of each run", "train loss, last epoch", "sent / dense", "seconds")


class Finished(NamedTuple):
    """A run that came to its end.

    Attributes:
        label: what distinguishes its method.
        simulated: whether its seconds are virtual.
        summary: its summary.
        events: the lines of its metrics.
    """

    label: str
    simulated: bool
    summary: dict[str, Any]
    events: list[dict[str, Any]]

    @property
    def metric(self) -> float:
        """The last value of the task's metric."""
        value: float = self.summary["final"][self.summary["metric"]]
        return value

    @property
    def train_loss(self) -> float:
        """The mean training loss of the last epoch."""
        training = [event for event in self.events if event["kind"] == "train"]
        return mean(event["loss"] for event in training if event["epoch"] > training[-1]["epoch"] - 1)

    @property
    def share(self) -> float:
        """Bytes sent, compared with a dense ring; 1 where there is nothing to send."""
        dense: float = self.summary["step_bytes_dense"]
        return self.summary["step_bytes"] / dense if dense else 1.0

    @property
    def seconds(self) -> float:
        """On the cluster's clock."""
        value: float = self.summary["cluster_seconds"]
        return value


def read(folder: Path) -> Finished | None:
    """Reads a run folder; ``None`` if it is none, or not finished."""
    try:
        summary = json.loads((folder / "summary.json").read_text())
        config = yaml.safe_load((folder / "config.yaml").read_text())
        events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        return None
    if summary.get("status") != "finished":
        return None
    return Finished(label(config), "network" in config["cluster"], summary, events)


def label(config: dict[str, Any]) -> str:
    """What distinguishes a method, in the words of its configuration."""
    nodes = ["compressor", "communicator", "residual"]
    if config.get("momentum", {}).get("factor") is not None:
        nodes.append("momentum")
    parts = [config[node]["_target_"].rsplit(".", 1)[1] for node in nodes]
    options = {key: value for node in nodes[:2] for key, value in config[node].items() if key != "seed"}
    return " ".join([" + ".join(parts), *(f"{key}={value}" for key, value in options.items() if key != "_target_")])


def table(runs: Sequence[Finished]) -> str:
    """A Markdown table, one row per method, over its seeds."""
    groups: defaultdict[str, list[Finished]] = defaultdict(list)
    for run in runs:
        groups[run.label].append(run)
    rows = [row(name, found) for name, found in groups.items()]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (COLUMNS, ["---"] * len(COLUMNS), *rows))


def row(name: str, runs: Sequence[Finished]) -> list[str]:
    """The cells of one method."""
    return [
        name,
        f"{runs[0].summary['metric']} {spread([run.metric for run in runs])}",
        ", ".join(f"{run.metric:.4f}" for run in runs),
        spread([run.train_loss for run in runs]),
        f"{mean(run.share for run in runs):.2%}",
        spread([run.seconds for run in runs]),
    ]


def plot(runs: Sequence[Finished], path: Path) -> None:
    """Draws each run's metric against the seconds of its cluster."""
    # Only who asks for a picture needs it.
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    labels = list(dict.fromkeys(run.label for run in runs))
    for number, name in enumerate(labels):
        for run in [run for run in runs if run.label == name]:
            pace = run.seconds / run.summary["steps"]
            points = [
                (event["step"] * pace, event[run.summary["metric"]]) for event in run.events if event["kind"] == "eval"
            ]
            axes.plot(*zip(*points, strict=True), color=f"C{number}", alpha=0.8, linewidth=1.2)
        axes.plot([], [], color=f"C{number}", label=name)
    axes.set_xlabel("virtual seconds" if runs[0].simulated else "seconds")
    axes.set_ylabel(runs[0].summary["metric"])
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=130)


def main() -> int:
    """Reads the folders on the command line."""
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
