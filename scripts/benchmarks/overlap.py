"""Measures how much communication each schedule overlaps, compared with the prediction of the timeline model.

python scripts/netlab.py run --workers 4 --gbit 1 -- python scripts/bench.py overlap --gbit 1 \
    --model profile:scripts/profiles/resnet50.json --compute 1.2 --schedules after_backward,wfbp,dear --json found.json

Workers sleep for the times of a profile instead of computing, as if each had a GPU: those that share few cores would
slow each other down. Gradients and messages are real. Runs as one of several workers, identified by RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT. The cases run in turns, so that other load affects them alike; figures are medians over the
rounds, with minimum and maximum. The prediction uses earlier measurements by all workers at once: a profile of the
model, latency and bandwidth of a round of messages, and the computation time of each method. The ideal overlaps the
bytes at the measured bandwidth perfectly with both passes; the bound does so at the bandwidth of --gbit.

With --streams 1,2,4 every case runs with each of these numbers of streams. The prediction is for one stream:

python scripts/netlab.py run --workers 4 --gbit 1 --delay-ms 5 -- python scripts/bench.py overlap --gbit 1 \
    --model profile:scripts/profiles/resnet50.json --compute 0.3 --schedules wfbp:bucket_mb=12 --streams 1,2,4
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from hydra import compose
from hydra.utils import instantiate
from torch import Tensor, nn

from scripts import choices
from scripts.benchmarks.timing import measured_network, positive
from spardl.basics.errors import ConfigError
from spardl.clusters import Network, ProcessGroupCluster, gather_rows
from spardl.clusters.profile import Profile
from spardl.diagnostics.commands.profile import Job
from spardl.diagnostics.commands.timeline import markdown
from spardl.diagnostics.timeline.measure import measure
from spardl.diagnostics.timeline.model import (
    Timeline,
    after_backward,
    halves,
    ideal_halves,
    in_backward,
    in_halves,
    whole,
)
from spardl.method.method import Method
from spardl.protocol.programs import Phase
from spardl.schedules import AfterBackward, Engine, Schedule, Training
from spardl.schedules.fusion import Linear
from spardl.vector.flat import FlatGradient
from spardl.vector.layout import Layout
from trainer.targets import importable

Clusters = Mapping[int, ProcessGroupCluster]
LOCAL = (Phase.SELECT, Phase.PACK, Phase.MERGE)
# Steps before the timed ones, after which schedules that calibrate have settled.
SETTLING = 8


@dataclass
class Case:
    """One method under one schedule, with its own model; ``seconds`` are those of a step, by round."""

    method: str
    schedule: str
    synchronizer: Engine
    cluster: ProcessGroupCluster
    streams: int
    job: Job
    seconds: list[float]

    def step(self) -> None:
        """Trains one step."""
        self.synchronizer.begin(0)
        loss = self.job.loss(self.job.model, self.job.data)
        self.synchronizer.before_backward(last=True)
        loss.backward()
        self.synchronizer.collect()
        self.synchronizer.finish()

    def measure(self, steps: int) -> None:
        """Records the mean time of consecutive steps, after one step that fills the pipeline."""
        wait_for_all(self.cluster)
        self.step()
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.seconds.append((time.perf_counter() - began) / steps)
        self.synchronizer.flush()


def wait_for_all(cluster: ProcessGroupCluster) -> None:
    gather_rows(cluster, [torch.zeros(1)])


class _Pass(torch.autograd.Function):
    """A layer whose output does not depend on its weights, but whose weights get a gradient."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, forward: float, backward: float) -> Tensor:
        ctx.gradient, ctx.seconds = torch.full_like(weight, 1e-3), backward
        time.sleep(forward)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, Tensor, None, None]:
        time.sleep(ctx.seconds)
        return outer[0], ctx.gradient, None, None


class _Layer(nn.Module):
    def __init__(self, entries: int, forward: float, backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(entries))
        self._seconds = (max(0.0, forward), max(0.0, backward))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = _Pass.apply(inputs, self.weight, *self._seconds)
        return outputs


class Emulated(nn.Module):
    """A model that computes by sleeping: the times and sizes of a profile, with real gradients and communication.

    The layers follow one after the other in the order of their first use. If several workers share few cores, each is
    slowed down by the computation of the others and by its own communication, unlike a worker with a GPU. Here, passes
    only sleep, so any number of workers fits on a machine.

    Args:
        profile: Layer times and sizes of the model.
    """

    def __init__(self, profile: Profile) -> None:
        super().__init__()
        layers = sorted(profile.layers, key=lambda layer: layer.needed)
        needed = [0.0, *(layer.needed for layer in layers[1:]), profile.forward]
        # The backward pass visits the layers in reverse order, and ends after the first one.
        ready = [profile.backward, *(layer.ready for layer in layers[1:]), 0.0]
        forward = [later - sooner for sooner, later in itertools.pairwise(needed)]
        backward = [later - sooner for later, sooner in itertools.pairwise(ready)]
        sizes = [layer.entries for layer in layers]
        self.layers = nn.Sequential(*map(_Layer, sizes, forward, backward))

    def forward(self, inputs: Tensor) -> Tensor:
        """Passes the inputs on, after the forward pass's seconds."""
        passed: Tensor = self.layers(inputs)
        return passed


def emulated(path: str, seconds: float | None = None) -> Job:
    """Returns the model of a profile, scaled to the given seconds of both passes."""
    profile = Profile.read(Path(path))
    if seconds is not None:
        profile = profile.scaled(seconds)
    inputs = torch.zeros(1, requires_grad=True)
    return Job(Emulated(profile), {"inputs": inputs}, lambda model, data: model(data["inputs"]).sum())


def make_job(arguments: argparse.Namespace) -> Job:
    source, _, path = arguments.model.partition(":")
    if source != "profile":
        raise ConfigError(f"--model must be profile:FILE, got {arguments.model}")
    return emulated(path, arguments.compute)


def make_case(method: str, schedule: str, streams: int, clusters: Clusters, arguments: argparse.Namespace) -> Case:
    cluster = clusters[streams]
    job = make_job(arguments)
    choice, _, option = schedule.partition(":")
    config = compose("train", [f"schedule={choice}", *([f"schedule.{option}"] if option else [])])
    chosen: Schedule = instantiate(importable(config.schedule))
    made = choices.build(method, "warmup.steps=0")
    chosen.check(made, clips=False)
    optimizer = torch.optim.SGD(job.model.parameters(), lr=1e-6, momentum=0.9)
    training = Training(job.model, FlatGradient(job.model.named_parameters()), optimizer)
    return Case(method, schedule, chosen.start(made, cluster, training), cluster, streams, job, [])


def make_cases(arguments: argparse.Namespace) -> list[Case]:
    """Combines all methods, schedules and numbers of streams."""
    streams = [positive(word) for word in arguments.streams.split(",")]
    clusters = {each: ProcessGroupCluster(timeout=120, streams=each) for each in streams}
    combined = itertools.product(arguments.methods.split(","), arguments.schedules.split(","), clusters)
    return [make_case(*choice, clusters, arguments) for choice in combined]


def measured_profile(arguments: argparse.Namespace) -> Profile:
    """Profile of the model, measured on all workers at once because they also share the machine in training."""
    job = make_job(arguments)
    optimizer = torch.optim.SGD(job.model.parameters(), lr=1e-6, momentum=0.9)
    return measure(
        job.model,
        lambda: job.loss(job.model, job.data),
        optimizer,
        name=arguments.model,
        batch=1,
        passes=max(5, arguments.rounds),
    )


def compression(method: Method, cluster: ProcessGroupCluster, length: int) -> Linear:
    """Returns the computation time of a synchronization by number of entries, from the ledger."""
    (worker,), (ledger,) = cluster.local_workers, cluster.ledgers
    sizes, seconds = [length // share for share in (64, 8, 1)], []
    for size in sizes:
        state, found = method.init_state(Layout.flat(size), torch.float32), []
        for _ in range(4):
            method.accumulate(torch.randn(size), state)
            before = sum(ledger.seconds[phase] for phase in LOCAL)
            cluster.run([method.average(worker, state)])
            found.append(sum(ledger.seconds[phase] for phase in LOCAL) - before)
        seconds.append(median(found[1:]))
    return Linear.fit(sizes, seconds)


def predict(case: Case, method: Method, profile: Profile, workers: int, network: Network, local: Linear) -> Timeline:
    groups = case.synchronizer.partition
    if getattr(case.synchronizer, "pauses", False):
        return in_halves(profile, groups, *halves(method, workers, network, local))
    if case.schedule == AfterBackward.name:
        return after_backward(profile, whole(method, workers, network, local))
    return in_backward(profile, groups, whole(method, workers, network, local))


def ideal_of(method: Method, profile: Profile, workers: int, gbit: float) -> float | None:
    """Returns the step time that counts only bytes at a bandwidth; ``None`` for a method without halves."""
    try:
        both = halves(method, workers, Network(alpha=0, gbit=gbit), lambda entries: 0.0)
    except ConfigError:
        return None
    first, second = (half.seconds(sum(profile.entries)) for half in both)
    return ideal_halves(profile, first, second)


def rows(cases: Sequence[Case], cluster: ProcessGroupCluster, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures and predicts all cases."""
    profile = measured_profile(arguments)
    network = measured_network(cluster)
    methods = {name: choices.build(name, "warmup.steps=0") for name in dict.fromkeys(case.method for case in cases)}
    local = {name: compression(method, cluster, sum(profile.entries)) for name, method in methods.items()}
    for case in cases:
        for _ in range(arguments.settle):
            case.step()
        case.synchronizer.flush()
    for _ in range(arguments.rounds):
        for case in cases:
            case.measure(arguments.steps)
    found = []
    for case in cases:
        setting = (methods[case.method], profile, cluster.size, network, local[case.method])
        found.append(
            {
                "method": case.method,
                "schedule": case.schedule,
                "groups": len(case.synchronizer.partition),
                "streams": case.streams,
                "seconds": case.seconds,
                "predicted": predict(case, *setting).seconds if case.streams == 1 else None,
                "ideal": ideal_of(methods[case.method], profile, cluster.size, network.gbit),
                "bound": ideal_of(methods[case.method], profile, cluster.size, arguments.gbit),
                "compute": profile.compute,
                "alpha": network.alpha,
                "gbit": network.gbit,
            }
        )
    return found


def shown(found: Sequence[dict[str, Any]]) -> str:
    header = ["method", "schedule", "groups", "streams", "median s", "least", "most"]
    header += ["predicted", "off", "ideal", "reached", "bound", "reached"]
    rows = []
    for row in found:
        middle = median(row["seconds"])
        cells = [row["method"], row["schedule"], str(row["groups"]), str(row["streams"])]
        cells += [f"{value:.3f}" for value in (middle, min(row["seconds"]), max(row["seconds"]))]
        cells += [f"{row['predicted']:.3f}", f"{row['predicted'] / middle - 1:+.1%}"] if row["predicted"] else ["", ""]
        for name in ("ideal", "bound"):
            cells += [f"{row[name]:.3f}", f"{row[name] / middle:.1%}"] if row[name] else ["", ""]
        rows.append(cells)
    first = found[0]
    start = f"compute {first['compute']:.3f} s; a round {1e6 * first['alpha']:.0f} us and {first['gbit']:.3f} Gbit/s"
    return f"{start}\n{markdown([header, *rows])}"


NEEDS_WORKERS = True


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="profile:FILE, a file of spardl profile")
    parser.add_argument("--compute", type=float, help="seconds of forward and backward pass (default: as profiled)")
    parser.add_argument("--methods", default="none", help="comma-separated choices of compressor=")
    parser.add_argument(
        "--schedules", default="after_backward,wfbp,dear", help="comma-separated schedules, such as wfbp:bucket_mb=5"
    )
    parser.add_argument("--gbit", type=float, required=True, help="bandwidth of a link, for the bound")
    parser.add_argument("--rounds", type=positive, default=7, help="turns per case")
    parser.add_argument("--steps", type=positive, default=3, help="steps per turn")
    parser.add_argument("--settle", type=positive, default=SETTLING, help="steps per case before the first turn")
    parser.add_argument("--streams", default="1", help="comma-separated numbers of synchronizations in flight")


def run(arguments: argparse.Namespace) -> list[dict[str, Any]] | None:
    dist.init_process_group("gloo")
    cluster = ProcessGroupCluster(timeout=120)
    with choices.composing():
        cases = make_cases(arguments)
        found = rows(cases, cluster, arguments)
    if cluster.leads:
        print(shown(found))
    for used in dict.fromkeys(case.cluster for case in cases):
        used.release()
    cluster.close()
    return found if cluster.leads else None
