"""Predicts iteration times of five models with six schedules on two networks, for P = 64 workers.

python scripts/bench.py schedules --json bench.json
python scripts/bench.py schedules --models resnet50

Each model is predicted twice: as measured on a CPU (scripts/profiles/), and with that profile scaled to an ASSUMED GPU
time (ASSUMED below). Compression times are those of scripts/profiles/compression.json on the CPU, and assumed on the
GPU. A second set of tables gives the gain of LayerFusion for sparse methods.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from scripts import choices
from spardl.clusters.network import PRESETS, Network
from spardl.clusters.profile import Profile
from spardl.diagnostics.commands.timeline import markdown, parse_names
from spardl.diagnostics.timeline import model as schedules
from spardl.diagnostics.timeline.measure import read_compression
from spardl.diagnostics.timeline.model import in_backward
from spardl.schedules.fusion import Linear

PROFILES = Path(__file__).resolve().parents[1] / "profiles"
WORKERS = 64
NETWORKS = ("ethernet_10g", "infiniband_100g")
DENSE, SPARSE = "none", "spardl"
FUSED = ("spardl", "topka", "count_sketch")
NOTHING = Linear(0.0, 0.0)


class Assumed(NamedTuple):
    """Assumed pass times of one model on a GPU.

    Attributes:
        seconds: Time of forward and backward pass together in seconds.
        batch: Number of examples per pass.
        certainty: Source of the value and its reliability.
    """

    seconds: float
    batch: int
    certainty: str


# An RTX 2080 Ti in float32 with the batches of DeAR's benchmark. NOT measured: this GPU was not available.
ASSUMED: Mapping[str, Assumed] = MappingProxyType(
    {
        "resnet50": Assumed(0.22, 64, "from memory: about 290 pictures/s; medium"),
        "densenet201": Assumed(0.27, 32, "from memory: about 120 pictures/s; low"),
        "inception_v4": Assumed(0.60, 64, "three times the products of ResNet-50; low"),
        "bert_base": Assumed(0.27, 64, "6 x 110 M x 64 x 64 products and sums at 10 TFLOP/s; low"),
        "bert_large": Assumed(0.42, 32, "6 x 336 M x 32 x 64 products and sums at 10 TFLOP/s; low"),
    }
)
# Five memory accesses per entry (SGD with momentum) at 616 GB/s, plus kernel launches; medium certainty.
ASSUMED_UPDATE = 5e-11
# By method: several hundred kernel launches for 64 selections, and 15 memory accesses per entry at 616 GB/s; a sketch
# hashes three rows and looks up all entries. Low certainty.
ASSUMED_COMPRESSION: Mapping[str, Linear] = MappingProxyType(
    {"spardl": Linear(3e-3, 1e-10), "topka": Linear(0.5e-3, 1e-10), "count_sketch": Linear(1e-3, 5e-10)}
)


def assumed_compression(workers: int) -> Mapping[str, Linear]:
    """Returns ``ASSUMED_COMPRESSION`` scaled from 64 workers to another number: SparDL selects once per worker."""
    blocks, once = ASSUMED_COMPRESSION[SPARSE], ASSUMED_COMPRESSION["topka"]
    launches = once.fixed + (blocks.fixed - once.fixed) * workers / WORKERS
    return {**ASSUMED_COMPRESSION, SPARSE: replace(blocks, fixed=launches)}


COLUMNS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "WFBP (per layer)": (DENSE, "per_layer"),
        "DDP-like 25 MB": (DENSE, "wfbp"),
        "MG-WFBP": (DENSE, "mg_wfbp"),
        "LayerFusion": (DENSE, "layer_fusion"),
        "DeAR 25 MB": (DENSE, "dear"),
        "DeAR tuned": (DENSE, "dear_tuned"),
        "sparse DeAR": (SPARSE, "dear_tuned"),
    }
)


@dataclass(frozen=True)
class Device:
    """A device with its profiles and compression times.

    Attributes:
        name: Name for the tables.
        profiles: Profile of each model.
        compressing: Seconds of compression by method.
    """

    name: str
    profiles: Mapping[str, Profile]
    compressing: Mapping[str, Linear]


def devices(models: Sequence[str]) -> list[Device]:
    """Returns the measured CPU and the assumed GPU.

    Raises:
        ConfigError: If a profile cannot be read.
    """
    measured = {model: Profile.read(PROFILES / f"{model}.json") for model in models}
    assumed = {
        model: replace(
            profile.scaled(ASSUMED[model].seconds),
            device="RTX 2080 Ti, assumed",
            batch=ASSUMED[model].batch,
            update=ASSUMED_UPDATE,
        )
        for model, profile in measured.items()
    }
    lines = read_compression(PROFILES / "compression.json", WORKERS)
    return [Device("CPU, measured", measured, lines), Device("GPU, assumed", assumed, ASSUMED_COMPRESSION)]


def methods_costs() -> dict[str, schedules.MethodCosts]:
    """Costs of the methods without a network, so that rounds and words are computed only once."""
    nowhere = Network(alpha=0.0, gbit=1.0)
    with choices.composing():
        made = {name: choices.build(name, "warmup.steps=0") for name in (DENSE, *FUSED)}
    return {name: schedules.MethodCosts.of(method, WORKERS, nowhere, NOTHING) for name, method in made.items()}


class Row(NamedTuple):
    """One row of a table.

    Attributes:
        device: Name of the device.
        network: Preset of the network.
        model: Name of the model.
        seconds: Predicted seconds by column.
    """

    device: str
    network: str
    model: str
    seconds: Mapping[str, float]


def cases(found: Sequence[Device]) -> Iterator[tuple[Device, str, str, Profile]]:
    """All combinations of device, network and model."""
    for device in found:
        for network in NETWORKS:
            for model, profile in device.profiles.items():
                yield device, network, model, profile


def bench(found: Sequence[Device], costs: Mapping[str, schedules.MethodCosts]) -> list[Row]:
    """Returns the seconds of an iteration under every schedule."""
    return [
        Row(
            device.name,
            network,
            model,
            {title: _seconds(device, network, profile, costs, *column) for title, column in COLUMNS.items()},
        )
        for device, network, model, profile in cases(found)
    ]


def _seconds(
    device: Device,
    network: str,
    profile: Profile,
    costs: Mapping[str, schedules.MethodCosts],
    method: str,
    schedule: str,
) -> float:
    placed = costs[method].on(PRESETS[network], device.compressing.get(method, NOTHING))
    predicted = schedules.SCHEDULES[schedule](profile, placed)
    assert predicted
    return predicted.seconds


def gains(found: Sequence[Device], costs: Mapping[str, schedules.MethodCosts]) -> list[Row]:
    """Seconds of an iteration with one group per layer, with one group for the model, and with LayerFusion."""
    rows = []
    for device, network, model, profile in cases(found):
        for method in FUSED:
            cost = costs[method].on(PRESETS[network], device.compressing[method]).whole
            partitions = {
                "every layer alone": schedules.groups_by_size(0, profile, cost),
                "whole model": schedules.groups_by_size(math.inf, profile, cost),
                "LayerFusion": schedules.fused(profile, cost),
            }
            seconds = {name: in_backward(profile, groups, cost).seconds for name, groups in partitions.items()}
            rows.append(Row(device.name, network, f"{model}, {method}", seconds))
    return rows


def tables(rows: Sequence[Row]) -> str:
    """One Markdown table per device and network: seconds, and the saving of the last column over the best other."""
    found = []
    for device, network in dict.fromkeys((row.device, row.network) for row in rows):
        mine = [row for row in rows if (row.device, row.network) == (device, network)]
        header = ["model", *mine[0].seconds, "the last saves"]
        body = [[row.model, *(f"{seconds:.4g}" for seconds in row.seconds.values()), saving(row)] for row in mine]
        found.append(f"{device}, {network}:\n\n{markdown([header, *body])}\n")
    return "\n".join(found)


def saving(row: Row) -> str:
    """Returns the saving of the last column, as a share of the best other column."""
    *others, last = row.seconds.values()
    return f"{1 - last / min(others):.1%}"


def used(found: Sequence[Device]) -> str:
    """Returns the table of the profiles behind the predictions."""
    header = ["profile", "device", "batch", "layers", "entries", "forward", "backward", "update"]
    body = [
        [
            model,
            profile.device,
            str(profile.batch),
            str(len(profile.layers)),
            f"{sum(profile.entries):,}",
            f"{profile.forward:.4g}",
            f"{profile.backward:.4g}",
            f"{profile.update * sum(profile.entries):.3g}",
        ]
        for device in found
        for model, profile in device.profiles.items()
    ]
    return markdown([header, *body])


def sections() -> dict[str, str]:
    """Returns the generated sections of docs/tables/timeline.md.

    Raises:
        ConfigError: If a profile cannot be read.
    """
    found, costs = devices(tuple(ASSUMED)), methods_costs()
    made = {"profiles": used(found), "schedules": tables(bench(found, costs)), "gains": tables(gains(found, costs))}
    return {name: text.rstrip("\n") for name, text in made.items()}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default=",".join(ASSUMED), help="comma-separated models")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    found = devices(parse_names(arguments.models, tuple(ASSUMED), "--models"))
    costs = methods_costs()
    rows, fused = bench(found, costs), gains(found, costs)
    print(f"{used(found)}\n\n{tables(rows)}\n{tables(fused)}")
    return {
        "workers": WORKERS,
        "assumed": {model: assumed._asdict() for model, assumed in ASSUMED.items()},
        "schedules": [row._asdict() for row in rows],
        "layer_fusion": [row._asdict() for row in fused],
    }
