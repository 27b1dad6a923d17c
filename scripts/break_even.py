"""Prints the tables of docs/tables/break-even.md: which method is fastest on which network, by spardl.advise.

python scripts/break_even.py
python scripts/break_even.py --measure compressing.json

Each model is predicted twice: as measured on a CPU (scripts/profiles/), and with that profile scaled to an ASSUMED GPU
time (scripts/exhibits/kinds/gpu.py, scripts/benchmarks/schedules.py). Compression on the CPU was measured once,
with --measure, and is stored in scripts/profiles/break_even.json, so that the tables do not change from run to run.
scripts/docs.py writes them into the page.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

import spardl
from scripts.benchmarks import schedules as bench_schedules
from scripts.exhibits.kinds.gpu import COMPRESSING, MODELS, seconds_to_compress
from spardl.basics.errors import ConfigError
from spardl.basics.files import read_json, write_atomically
from spardl.clusters.network import PRESETS, Network
from spardl.clusters.profile import Profile
from spardl.diagnostics import Advice, Choice
from spardl.diagnostics.advice import Compressing
from spardl.diagnostics.commands.timeline import markdown
from spardl.diagnostics.timeline.measure import measure_compression
from spardl.diagnostics.timeline.model import whole
from spardl.schedules.fusion import Linear

PROFILES = Path(__file__).resolve().parent / "profiles"
MEASURED = PROFILES / "break_even.json"
WORKERS = (4, 16, 64)
NETWORKS: Mapping[str, Network] = MappingProxyType(
    {
        "0.1 Gbit/s": Network(alpha=50e-6, gbit=0.1),
        "1 Gbit/s": PRESETS["ethernet_1g"],
        "10 Gbit/s": PRESETS["ethernet_10g"],
        "25 Gbit/s": PRESETS["ethernet_25g"],
        "100 Gbit/s": PRESETS["ethernet_100g"],
    }
)
# Break-even bandwidths are looked for with the start-up of 10 Gbit/s Ethernet, between these, in Gbit/s.
ALPHA = PRESETS["ethernet_10g"].alpha
LOW, HIGH = 0.01, 400.0
HALVINGS = 12
# Less is no gain: in the network lab the model was off by about as much (docs/schedules.md).
CLEAR = 1.05
DENSE, SHORT = "none", "bf16"
# What the tables compare: PowerSGD would need the shapes of these models, and a guess for GPUs.
COMPARED = (DENSE, SHORT, "topka", "oktopk", "spardl")
advise = partial(spardl.advise, methods=COMPARED, schedules=("after_backward", "wfbp", "dear"))
# A few launches of kernels, and 12 bytes for an entry there and back at 616 GB/s: assumed, low.
ASSUMED_CAST = Linear(5e-5, 2e-11)
# Entries of all simulated workers together that are measured at; beyond, the line is drawn on.
SIZES = (1 << 20, 1 << 23, 1 << 25)
TURNS = 3
NOTHING = Linear(0.0, 0.0)
# Seconds of a GPU for both passes: by profile.
SECONDS: Mapping[str, float] = MappingProxyType(
    {
        "vgg16": MODELS["vgg16"].seconds,
        "resnet50": bench_schedules.ASSUMED["resnet50"].seconds,
        "lstm_ptb": MODELS["lstm_ptb"].seconds,
        "bert_base": bench_schedules.ASSUMED["bert_base"].seconds,
        "bert_large": bench_schedules.ASSUMED["bert_large"].seconds,
    }
)


class Device(NamedTuple):
    """A device type, with the profiles and compression times to predict for it.

    Attributes:
        title: Title of its table.
        profiles: Layer times by model.
        compressing: Compression times by number of workers.
    """

    title: str
    profiles: Mapping[str, Profile]
    compressing: Callable[[int], Compressing]


def label(name: str, options: Mapping[str, Any]) -> str:
    """Returns the name of a method in the tables and in the file of times."""
    return f"{name}, {options['teams']} teams" if options.get("teams", 1) > 1 else name


# --- what compressing takes


def measured(path: Path) -> Callable[[int], Compressing]:
    """Reads the compression times that --measure wrote.

    Raises:
        ConfigError: If it cannot be read; later, if it lacks a number of workers or a method.
    """
    try:
        plain = read_json(path)["workers"]
        lines = {
            (int(workers), name): Linear(line["fixed"], line["per_entry"])
            for workers, methods in plain.items()
            for name, line in methods.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} contains no valid times ({error!r}); create it with --measure {path}") from error

    def line(workers: int, name: str, options: Mapping[str, Any]) -> Linear:
        try:
            return lines[workers, label(name, options)]
        except KeyError as error:
            raise ConfigError(f"{path} has no times of {error}; create it again with --measure {path}") from error

    return lambda workers: lambda name, options: line(workers, name, options)


def assumed(workers: int) -> Compressing:
    """Returns the compression times that a GPU is assumed to need."""

    def seconds(name: str, options: Mapping[str, Any]) -> Callable[[int], float]:
        if name not in COMPRESSING:
            return ASSUMED_CAST
        formula = whole(spardl.make_method(name, **options), workers, NETWORKS["1 Gbit/s"], NOTHING).formula
        return lambda entries: seconds_to_compress(name, entries, workers, sum(formula(entries).words) / 2)

    return seconds


def measure() -> dict[str, Any]:
    """Measures the compression times on one core, of every method that spardl.advise considers, as plain data."""
    found: dict[str, dict[str, Any]] = {}
    profile = Profile.read(PROFILES / "resnet20.json")
    for workers in WORKERS:
        choices = advise(profile, workers=workers, compressing=lambda name, options: NOTHING).choices
        found[str(workers)] = {
            label(choice.method, choice.options): _line(choice, workers) for choice in choices if choice.method != DENSE
        }
    return {"device": "cpu, threads: 1", "workers": found}


def _line(choice: Choice, workers: int) -> dict[str, Any]:
    """Fits a line to the shortest times, because other load only adds time."""
    method, sizes = spardl.make_method(choice.method, **choice.options), [total // workers for total in SIZES]
    turns = [measure_compression(method, workers, sizes)[1] for _ in range(TURNS)]
    seconds = [min(turn) for turn in zip(*turns, strict=True)]
    line = Linear.fit(sizes, seconds)
    print(f"{workers} workers, {label(choice.method, choice.options)}: {line}", flush=True)
    return {"fixed": line.fixed, "per_entry": line.per_entry, "entries": sizes, "seconds": seconds}


def devices() -> Iterator[Device]:
    """The GPU as assumed, and the CPU as measured.

    Raises:
        ConfigError: If a file cannot be read.
    """
    profiles = {model: Profile.read(PROFILES / f"{model}.json") for model in SECONDS}
    scaled = {model: profile.scaled(SECONDS[model]) for model, profile in profiles.items()}
    yield Device("GPU (RTX 2080 Ti, float32), assumed", scaled, assumed)
    yield Device("CPU (one core of a server), measured", profiles, measured(MEASURED))


# --- what wins


def gains(advice: Advice) -> tuple[Choice, float, float]:
    """Returns the fastest sparse choice, its speedup over dense, and that of 16 bits."""
    dense, short = (next(choice for choice in advice.choices if choice.method == name) for name in (DENSE, SHORT))
    sparse = next(choice for choice in advice.choices if choice.method not in (DENSE, SHORT))
    return sparse, dense.seconds / sparse.seconds, dense.seconds / short.seconds


def winner(advice: Advice) -> str:
    """Returns the recommended method as a cell: sparse if it is clearly faster, otherwise 16 bits or dense."""
    sparse, gain, cast = gains(advice)
    if gain >= CLEAR * max(1.0, cast):
        return f"{gain:.3g}x {label(sparse.method, sparse.options)}"
    return f"{cast:.3g}x {SHORT}" if cast >= CLEAR else "dense"


def break_even(profile: Profile, workers: int, compressing: Compressing) -> str:
    """Returns the bandwidth below which a sparse method is clearly faster than dense and 16 bits, in Gbit/s."""

    def pays(gbit: float) -> bool:
        _, gain, cast = gains(advise(profile, Network(ALPHA, gbit), workers, compressing=compressing))
        return gain >= CLEAR * max(1.0, cast)

    if pays(HIGH):
        return f"{HIGH:g} and more"
    low, high = LOW, HIGH
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if pays(middle) else (low, middle)
    return f"{float(f'{low:.2g}'):g}" if low > LOW else "never"


def row(model: str, profile: Profile, workers: int, compressing: Compressing) -> list[str]:
    """Returns the table row of a model and a number of workers."""
    cells = [winner(advise(profile, network, workers, compressing=compressing)) for network in NETWORKS.values()]
    name = f"{model}: {sum(profile.entries) / 1e6:.3g} M, {profile.compute:.3g} s"
    return [name, str(workers), *cells, break_even(profile, workers, compressing)]


def table(device: Device) -> str:
    """Returns the table of recommended methods for a device, by model, network and number of workers."""
    header = ["model: parameters, computation", "workers", *NETWORKS, "sparse pays below (Gbit/s)"]
    compressing = {workers: device.compressing(workers) for workers in WORKERS}
    rows = [
        row(model, profile, workers, compressing[workers])
        for model, profile in device.profiles.items()
        for workers in WORKERS
    ]
    return f"{device.title}:\n\n{markdown([header, *rows])}"


def tables() -> str:
    """Returns the tables of all devices.

    Raises:
        ConfigError: If a file cannot be read.
    """
    return "\n\n".join(map(table, devices()))


def main() -> int:
    """Runs the command line, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, metavar="FILE", help="measure compression times and write them")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    try:
        if arguments.measure:
            write_atomically(arguments.measure, f"{json.dumps(measure(), indent=1)}\n".encode())
        else:
            print(tables())
    except (ConfigError, OSError, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
