"""Measures step time, bytes and loss of one model with the DDP hooks of torch and of spardl.

python scripts/netlab.py run --workers 4 --gbit 1 -- python scripts/bench.py hooks --json hooks.json

Runs as one of several workers, identified by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

Each case has its own copy of the model in its own DistributedDataParallel with the same training loop: zero_grad,
forward, backward, step, at a constant learning rate. Only the communication hook differs. All cases start with the same
weights, get the same batches with the same dropout, and run in turns, so that other load affects them alike. All steps
train; all but the first --settle of each case are timed, by the slowest worker.

A case is WAY or WAY,option=value: ddp (no hook), torch.fp16, torch.bf16, torch.powersgd (options rank and start, the
number of dense steps), spardl.METHOD with its options (optimizer=True passes the optimizer), outer.METHOD with the
options of spardl.Outer (local steps; a turn should have whole periods), and alone, which sends nothing and is the upper
bound of speed. Bytes are those sent by the interface GLOO_SOCKET_IFNAME, averaged over the workers: counted by the
kernel, including headers, in the same way for every case. In the network lab each worker has its own interface.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist

from scripts.benchmarks.ddp_hooks import ALONE, DENSE, TIMEOUT, parsed
from scripts.benchmarks.plain_loop import PlainLoop, Turn, of_all, planned
from scripts.benchmarks.timing import Row, positive, setting_of, table
from spardl.protocol.programs import Worker
from trainer.learner import Plan
from trainer.report import environment

CASES = (
    ALONE,
    DENSE,
    "torch.fp16",
    "torch.bf16",
    "torch.powersgd,rank=1",
    "torch.powersgd,rank=2",
    "torch.powersgd,rank=4",
    "spardl.none",
    "spardl.fp16",
    "spardl.powersgd,rank=4",
    "spardl.topka,density=0.01",
    "spardl.oktopk,density=0.01",
    "spardl.spardl,density=0.01",
    "spardl.spardl,density=0.001",
)
JOB = "model=resnet18,dataset=digits,optimizer.lr=0.02"
LOSS = "training loss"
LAST = 10  # steps at the end whose mean is the final training loss


@dataclass
class Case(PlainLoop):
    """One case with its own model on one worker, and its measured turns."""

    turns: list[Turn] = field(default_factory=list, kw_only=True)

    def take_turn(self, steps: int) -> None:
        """Trains some timed steps, which all workers start together."""
        self.turns.append(self.timed(steps))
        self.optimizer.zero_grad()  # frees memory for the gradients of other cases

    def last_loss(self) -> float:
        """Returns the mean training loss of all workers over the last steps."""
        last = torch.stack(self.losses[-LAST:]).double().mean()
        dist.all_reduce(last)
        return last.item() / self.worker.size


@dataclass
class Found:
    """Results of one case over all its trainings.

    Attributes:
        case: Name of the case.
        seconds: Time per step of the slowest worker in seconds, one value per turn.
        sent: Bytes sent per worker and step, as counted by the interface, one value per turn.
        counted: Bytes sent per worker and step, as counted by spardl without headers; ``None`` without spardl.
        learned: Metrics by name, one value per seed; empty for the case without communication.
    """

    case: str
    seconds: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    counted: float | None = None
    learned: dict[str, list[float]] = field(default_factory=dict)

    def add(self, case: Case) -> None:
        """Adds the results of a finished training."""
        turns = of_all(case.turns)
        self.seconds += [turn.seconds for turn in turns]
        self.sent += [turn.sent for turn in turns]
        self.counted = case.counted()
        learned = {} if case.name == ALONE else {LOSS: case.last_loss(), **case.tested()}
        for name, value in learned.items():
            self.learned.setdefault(name, []).append(value)

    def row(self, metric: str) -> Row:
        """Returns the row of the results table."""
        sent = f"{mean(self.sent) / 1e6:.3f}" if any(self.sent) else ""
        headers = {LOSS: LOSS, metric: f"test {metric}"}
        spreads = {header: _spread(self.learned.get(name, [])) for name, header in headers.items()}
        return Row(f"`{self.case}`", self.seconds, {"MB sent": sent, **spreads})


def _spread(values: Sequence[float]) -> str:
    return f"{mean(values):.4f} ({min(values):.4f}..{max(values):.4f})" if values else ""


def train(plan: Plan, arguments: argparse.Namespace) -> list[Found]:
    """Trains all cases in turns, one seed after the other."""
    worker = Worker(dist.get_rank(), dist.get_world_size())
    found = [Found(name) for name in dict.fromkeys(arguments.cases)]
    for seed in range(1, arguments.seeds + 1):
        cases = [Case(each.case, plan, seed, worker) for each in found]
        for case in cases:
            for _ in range(arguments.settle):
                case.step()
        for _ in range(arguments.rounds):
            for case in cases:
                case.take_turn(arguments.steps)
        for each, case in zip(found, cases, strict=True):
            each.add(case)
            case.close()
        del case, cases
        gc.collect()  # models, hooks and DDP objects form reference cycles
        if worker.rank == 0:
            print(f"seed {seed} of {arguments.seeds} is done", file=sys.stderr, flush=True)
    return found


def shown(content: Mapping[str, Any]) -> str:
    """Formats the results as Markdown."""
    rows = [Found(**row).row(content["metric"]) for row in content["rows"]]
    names = [row.name for row in rows]
    reference = f"`{DENSE}`" if f"`{DENSE}`" in names else names[0]
    made = "\n\nMeasured on {cpu}, at commit {commit}.".format_map(content["made"]) if "made" in content else ""
    return f"{content['title']}\n\n{table(rows, reference)}{made}"


NEEDS_WORKERS = True


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--train", default=JOB, help="comma-separated choices of train.py")
    parser.add_argument("--cases", nargs="+", default=list(CASES), metavar="CASE", help="cases, which run in turns")
    parser.add_argument("--seeds", type=positive, default=3, help="trainings per case")
    parser.add_argument("--settle", type=positive, default=5, help="steps per training before the first turn")
    parser.add_argument("--rounds", type=positive, default=12, help="turns per training")
    parser.add_argument("--steps", type=positive, default=5, help="steps per turn")
    parser.add_argument("--gbit", type=float, help="bandwidth of the links in Gbit/s, only written to the file")


def run(arguments: argparse.Namespace) -> dict[str, Any] | None:
    for case in arguments.cases:
        parsed(case)
    plan = planned(arguments.train)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    entries = sum(parameter.numel() for parameter in plan.task.build_model().parameters())
    rows = [asdict(each) for each in train(plan, arguments)]
    steps = arguments.settle + arguments.rounds * arguments.steps
    title = (
        f"`{arguments.train}`: {entries:,} parameters, {dist.get_world_size()} workers, batches of "
        f"{plan.settings.batch_size}, {steps} steps, {arguments.seeds} seeds, torch {torch.__version__}:"
    )
    setting, made = setting_of(arguments), environment()
    found = {"title": title, "metric": plan.task.metric, "setting": setting, "made": made, "rows": rows}
    if dist.get_rank():
        return None
    print(shown(found))
    return found
