"""Predicts the time of a training step under every schedule, from profiles and a network.

python scripts/timeline.py scripts/profiles/resnet50.json --workers 64 --network ethernet_10g
python scripts/timeline.py scripts/profiles/resnet50.json --compute 0.22 --schedules wfbp,dear --picture timeline.png

Prints a table of seconds for each profile. What compressing takes is left out unless --compression names a file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import choices
import compression

from spardl.basics.errors import ConfigError
from spardl.basics.files import write_atomically
from spardl.clusters.network import PRESETS, Network, parse_network
from spardl.clusters.profile import Profile
from spardl.diagnostics.timeline.costs import GroupCost, halves, whole
from spardl.diagnostics.timeline.model import Timeline, after_backward, in_backward, in_halves
from spardl.diagnostics.timeline.picture import draw
from spardl.method.method import Method
from spardl.schedules.fusion import Linear, Range, by_size
from spardl.schedules.layer_fusion import optimal
from spardl.schedules.mg_wfbp import merge

ENTRIES_PER_MB = (1 << 20) // 4
BUCKET_MB = 25.0
# Where DeAR's tuning starts, and four sizes for each doubling over the range that it tunes in.
SWEPT_MB = (BUCKET_MB, *(2 ** (step / 4) for step in range(33)))


@dataclass(frozen=True)
class Costs:
    """What a method costs on a network.

    Attributes:
        whole: in one piece.
        split: in two halves; ``None`` if it cannot be split.
    """

    whole: GroupCost
    split: tuple[GroupCost, GroupCost] | None

    @classmethod
    def of(cls, method: Method, workers: int, network: Network, compressing: Linear) -> Costs:
        """Of a method on so many workers.

        Raises:
            ConfigError: if it does not run on them.
        """
        try:
            split = halves(method, workers, network, compressing)
        except ConfigError:
            split = None
        return cls(whole(method, workers, network, compressing), split)

    def on(self, network: Network, compressing: Linear) -> Costs:
        """The same elsewhere; what was worked out about rounds and words is kept."""
        first = self.split and replace(self.split[0], network=network, compression=compressing)
        second = self.split and replace(self.split[1], network=network)
        split = (first, second) if first and second else None
        return Costs(replace(self.whole, network=network, compression=compressing), split)


def per_size(megabytes: float, profile: Profile, cost: GroupCost) -> list[Range]:
    """Groups of a limited size."""
    return by_size(profile.entries, megabytes * ENTRIES_PER_MB)


def merged(profile: Profile, cost: GroupCost) -> list[Range]:
    """MG-WFBP's groups."""
    return merge(profile.entries, profile.ready, cost.seconds, cost.startup)


def fused(profile: Profile, cost: GroupCost) -> list[Range]:
    """LayerFusion's groups."""
    return optimal(profile.entries, profile.ready, cost.seconds)


def at_the_end(profile: Profile, costs: Costs) -> Timeline:
    """One synchronization after the backward pass."""
    return after_backward(profile, costs.whole)


def beside_backward(cut: Callable[[Profile, GroupCost], list[Range]], profile: Profile, costs: Costs) -> Timeline:
    """Groups beside the backward pass."""
    return in_backward(profile, cut(profile, costs.whole), costs.whole)


def beside_both(megabytes: float, profile: Profile, costs: Costs) -> Timeline | None:
    """Halves beside both passes; ``None`` if the method has no halves."""
    if not costs.split:
        return None
    return in_halves(profile, per_size(megabytes, profile, costs.whole), *costs.split)


def beside_both_tuned(profile: Profile, costs: Costs) -> Timeline | None:
    """The best of a sweep of sizes."""
    found = [timeline for size in SWEPT_MB if (timeline := beside_both(size, profile, costs))]
    return min(found, key=lambda timeline: timeline.seconds, default=None)


Predict = Callable[[Profile, Costs], Timeline | None]
SCHEDULES: Mapping[str, Predict] = MappingProxyType(
    {
        "after_backward": at_the_end,
        "per_layer": partial(beside_backward, partial(per_size, 0)),
        "wfbp": partial(beside_backward, partial(per_size, BUCKET_MB)),
        "mg_wfbp": partial(beside_backward, merged),
        "layer_fusion": partial(beside_backward, fused),
        "dear_per_layer": partial(beside_both, 0),
        "dear": partial(beside_both, BUCKET_MB),
        "dear_tuned": beside_both_tuned,
    }
)


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


def table(cases: Mapping[str, Mapping[str, Timeline | None]], schedules: Sequence[str]) -> str:
    """Seconds of an iteration, one row for each method."""
    rows = [
        [method, *(f"{found[name].seconds:.4g}" if found[name] else "-" for name in schedules)]
        for method, found in cases.items()
    ]
    return markdown([["method", *schedules], *rows])


def predict(arguments: argparse.Namespace) -> dict[str, dict[str, dict[str, Timeline | None]]]:
    """The timelines by profile, method and schedule.

    Raises:
        ConfigError: if a name is unknown, a file cannot be read, or a method does not run on so many workers.
    """
    schedules = chosen(arguments.schedules, tuple(SCHEDULES), "--schedules")
    methods = chosen(arguments.methods, choices.names(), "--methods")
    network = parse_network(arguments.network)
    if arguments.workers < 1:
        raise ConfigError(f"--workers must be at least 1, got {arguments.workers}")
    lines = compression.read(arguments.compression, arguments.workers) if arguments.compression else {}
    profiles = [Profile.read(path) for path in arguments.profiles]
    if arguments.compute is not None:
        profiles = [profile.scaled(arguments.compute) for profile in profiles]
    with choices.composing():
        made = {name: choices.build(name, "warmup.steps=0") for name in methods}
    costs = {
        name: Costs.of(method, arguments.workers, network, lines.get(name, Linear(0.0, 0.0)))
        for name, method in made.items()
    }
    return {
        str(path): {
            method: {name: SCHEDULES[name](profile, cost) for name in schedules} for method, cost in costs.items()
        }
        for path, profile in zip(arguments.profiles, profiles, strict=True)
    }


def report(arguments: argparse.Namespace) -> None:
    """Prints tables, and writes what else was asked for.

    Raises:
        ConfigError: if something cannot be predicted.
        OSError: if a file cannot be written.
    """
    found = predict(arguments)
    title = f"{arguments.workers} workers, {arguments.network}"
    for path, cases in found.items():
        print(f"{path}, {title}: seconds of an iteration\n\n{table(cases, arguments.schedules.split(','))}\n")
    every = {
        (path, method, name): timeline
        for path, cases in found.items()
        for method, row in cases.items()
        for name, timeline in row.items()
        if timeline
    }
    if arguments.json:
        rows = [
            {"profile": path, "method": method, "schedule": name, "seconds": timeline.seconds}
            for (path, method, name), timeline in every.items()
        ]
        plain = {"workers": arguments.workers, "network": arguments.network, "predictions": rows}
        write_atomically(arguments.json, f"{json.dumps(plain, indent=1)}\n".encode())
    if arguments.picture:
        several = len(found) > 1
        named = [
            ("\n".join([*([Path(path).stem] if several else []), f"{method}, {name}"]), timeline)
            for (path, method, name), timeline in every.items()
        ]
        models = ", ".join(Path(path).stem for path in found)
        draw(named, arguments.picture, f"{models}, {title}")


def main() -> int:
    """Predicts what the command line asks for.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profiles", nargs="+", type=Path, metavar="PROFILE", help="written by profile_model.py")
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--network", default="ethernet_10g", help=f"one of {', '.join(PRESETS)}")
    parser.add_argument("--methods", default="none,spardl", help="choices of compressor=, with commas")
    parser.add_argument("--schedules", default=",".join(SCHEDULES), help="with commas")
    parser.add_argument("--compute", type=float, help="scale each profile to so many seconds, forward and backward")
    parser.add_argument("--compression", type=Path, help="times written by compression.py")
    parser.add_argument("--picture", type=Path, help="draw all timelines to this file (.png, .svg, .pdf)")
    parser.add_argument("--json", type=Path, help="write the predictions to this file")
    arguments = parser.parse_args()
    try:
        report(arguments)
    except (ConfigError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
