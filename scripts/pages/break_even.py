"""Tables of docs/tables/break-even.md: which method is fastest on which network, by spardl.advise.

Each model is predicted twice: as measured on a CPU (scripts/profiles/), and with that profile scaled to an ASSUMED GPU
time (scripts/exhibits/kinds/gpu.py). Compression on the CPU was measured once, with
spardl.diagnostics.timeline.measure.measure_compression and 4, 16 and 64 workers, and is stored in
scripts/profiles/break_even.json, so that the tables do not change from run to run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import spardl
from scripts.exhibits.kinds.gpu import ASSUMED, COMPRESSING, MODELS, NOTHING, PROFILES, seconds_to_compress
from scripts.exhibits.tables import replace_section
from spardl.clusters.network import PRESETS, Network
from spardl.clusters.profile import Profile
from spardl.diagnostics import Advice, Choice
from spardl.diagnostics.advice import Compressing
from spardl.diagnostics.commands.timeline import markdown
from spardl.diagnostics.timeline.model import whole
from spardl.schedules.fusion import Linear

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
# Seconds of a GPU for both passes: by profile.
SECONDS: Mapping[str, float] = MappingProxyType(
    {
        "vgg16": MODELS["vgg16"].seconds,
        "resnet50": ASSUMED["resnet50"].seconds,
        "lstm_ptb": MODELS["lstm_ptb"].seconds,
        "bert_base": ASSUMED["bert_base"].seconds,
        "bert_large": ASSUMED["bert_large"].seconds,
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
    """Returns the name of a method in the tables and in the stored compression times."""
    return f"{name}, {options['teams']} teams" if options.get("teams", 1) > 1 else name


def measured(workers: int) -> Compressing:
    """Returns the compression times that were measured on a CPU."""
    lines = json.loads((PROFILES / "break_even.json").read_text())["workers"][str(workers)]

    def line(name: str, options: Mapping[str, Any]) -> Linear:
        found = lines[label(name, options)]
        return Linear(found["fixed"], found["per_entry"])

    return line


def assumed(workers: int) -> Compressing:
    """Returns the compression times that a GPU is assumed to need."""

    def seconds(name: str, options: Mapping[str, Any]) -> Callable[[int], float]:
        if name not in COMPRESSING:
            return ASSUMED_CAST
        formula = whole(spardl.make_method(name, **options), workers, NETWORKS["1 Gbit/s"], NOTHING).formula
        return lambda entries: seconds_to_compress(name, entries, workers, sum(formula(entries).words) / 2)

    return seconds


def devices() -> Iterator[Device]:
    """The GPU as assumed, and the CPU as measured."""
    profiles = {model: Profile.read(PROFILES / f"{model}.json") for model in SECONDS}
    scaled = {model: profile.scaled(SECONDS[model]) for model, profile in profiles.items()}
    yield Device("GPU (RTX 2080 Ti, float32), assumed", scaled, assumed)
    yield Device("CPU (one core of a server), measured", profiles, measured)


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


def page(text: str) -> str:
    """Returns a page with the current tables of all devices."""
    return replace_section(text, "break-even", "\n\n".join(map(table, devices())))
