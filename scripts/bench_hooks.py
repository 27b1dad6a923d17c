"""Measures step time, bytes and loss of one model with the DDP hooks of torch and of spardl.

python scripts/netlab.py run --workers 4 --gbit 1 -- python scripts/bench_hooks.py --json hooks.json
python scripts/bench_hooks.py --read docs/results/torch-hooks.json --write docs/tables/torch-hooks.md

Runs as one of several workers, identified by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or shows the results in
the file of --read.

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
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist

from scripts.benchmarks.ddp_hooks import ALONE, DENSE, TIMEOUT, parsed
from scripts.benchmarks.plain_loop import PlainLoop, Turn, of_all, planned
from scripts.benchmarks.timing import Row, complain, positive, table
from scripts.pages.marked import replace
from spardl.basics.errors import ConfigError, SpardlError
from spardl.basics.files import write_atomically
from spardl.clusters.workers.processes import exit_now
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
    """One case with its own model on one worker.

    Attributes:
        turns: Measured repetitions of the case.
    """

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


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures all cases as one worker.

    Raises:
        ConfigError: If a case or a choice of train.py does not exist.
    """
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
    setting = {name: value for name, value in vars(arguments).items() if not isinstance(value, Path | None)}
    return {"title": title, "metric": plan.task.metric, "setting": setting, "made": environment(), "rows": rows}


def read(path: Path) -> dict[str, Any]:
    """Reads the results of an earlier run.

    Raises:
        ConfigError: If the file was not written by --json.
        OSError: If the file cannot be read.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        shown(content)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"--read {path} is not a file written by --json") from error
    return content


def put(page: Path, content: str) -> str:
    """Replaces the text between the marks of a page.

    Raises:
        ConfigError: If the page has no marks.
        OSError: If the page cannot be read.
    """
    try:
        return replace(page.read_text(), "hooks", content)
    except ValueError as error:
        raise ConfigError(
            f"--write {page} lacks the lines <!-- hooks: REMARK --> and <!-- end of hooks -->; add them"
        ) from error


def act(arguments: argparse.Namespace) -> None:
    """Measures or reads results, then prints and writes them.

    Raises:
        ConfigError: If a case or a choice of train.py does not exist, or this process is not a worker.
        OSError: If a file cannot be read or written.
    """
    if arguments.read is None and "RANK" not in os.environ:
        raise ConfigError("no RANK in the environment; start this with scripts/netlab.py run or torchrun")
    if arguments.json and not arguments.json.parent.is_dir():
        raise ConfigError(f"--json {arguments.json}: create the folder {arguments.json.parent} first")
    if arguments.write:
        put(arguments.write, "")  # fail before the measurement, which takes minutes
    content = read(arguments.read) if arguments.read else measured(arguments)
    if os.environ.get("RANK", "0") != "0":
        return
    print(shown(content))
    if arguments.json:
        write_atomically(arguments.json, f"{json.dumps(content, indent=1)}\n".encode())
    if arguments.write:
        write_atomically(arguments.write, put(arguments.write, f"\n{shown(content)}\n").encode())


def main() -> int:
    """Runs the command line, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", default=JOB, help="comma-separated choices of train.py")
    parser.add_argument("--cases", nargs="+", default=list(CASES), metavar="CASE", help="cases, which run in turns")
    parser.add_argument("--seeds", type=positive, default=3, help="trainings per case")
    parser.add_argument("--settle", type=positive, default=5, help="steps per training before the first turn")
    parser.add_argument("--rounds", type=positive, default=12, help="turns per training")
    parser.add_argument("--steps", type=positive, default=5, help="steps per turn")
    parser.add_argument("--gbit", type=float, help="bandwidth of the links in Gbit/s, only written to the file")
    parser.add_argument("--read", type=Path, help="file of an earlier run to show, instead of measuring")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the table between the marks of a page")
    torch.set_num_threads(1)
    try:
        act(parser.parse_args())
    except (SpardlError, OSError) as error:
        return complain(error)
    return 0


if __name__ == "__main__":
    exit_now(main())  # torch may abort at interpreter shutdown if one of its threads is still running
