r"""Trains a model with one method of averaging gradients, and records its metric over wall-clock time.

python scripts/netlab.py run --workers 4 --gbit 0.1 -- python scripts/bench.py accuracy --case ddp --steps 240 \
    --train model=lstm_imdb,dataset=synthetic_imdb,dataset.vocab_size=20001,optimizer=adamw,training.batch_size=8

Runs as one of several workers, identified by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. The exhibit
spardl.time_to_accuracy of scripts/reproduce.py runs it with every method over links of several bandwidths.

The training loop uses torch's DDP, as in bench.py hooks: zero_grad, forward, backward, step. A case is one of those of
bench.py hooks, such as spardl.topka,density=0.01; optimizer=True passes the optimizer to our hook (attach(...,
optimizer=)), and recipe=published selects the published form of the method. The learning rate follows the schedule of
--train over --steps.

Time is the wall-clock time of the slowest worker during training steps. It excludes tests, every --every steps, and
three steps of a discarded model that warm up imports and caches. Bytes are those sent by the interface
GLOO_SOCKET_IFNAME during this time, averaged over the workers: counted by the kernel, including headers.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from scripts.benchmarks.ddp_hooks import TIMEOUT, moves_optimizer
from scripts.benchmarks.plain_loop import PlainLoop, of_all, planned
from scripts.benchmarks.timing import positive
from spardl.protocol.programs import Worker
from trainer.learner import Plan

THROWN_AWAY = 3  # steps; the third is the first that torch's PowerSGD compresses
DIGITS = 5  # of seconds and figures, in files


def begin(plan: Plan, case: str, seed: int, steps: int) -> PlainLoop:
    """Returns a model that is ready to be trained for some steps, with the learning rates of the plan."""
    worker = Worker(dist.get_rank(), dist.get_world_size())
    per_epoch = plan.sampler(worker).steps_per_epoch

    def rate(step: int) -> float:
        return plan.lr_schedule.factor(step / per_epoch, steps / per_epoch)

    return PlainLoop(case, plan, seed, worker, rate=rate)


def trained(plan: Plan, case: str, seed: int, steps: int, every: int) -> list[dict[str, Any]]:
    """Trains, and tests at regular intervals and after the last step.

    Returns:
        For each test: ``step``, ``seconds`` of training so far, bytes ``sent`` per worker so far, and the metrics.
    """
    before = begin(plan, case, seed, THROWN_AWAY)
    before.timed(THROWN_AWAY)
    before.close()
    loop = begin(plan, case, seed, steps)
    tests: list[dict[str, Any]] = []
    seconds = sent = 0.0
    for done in range(0, steps, every):
        count = min(every, steps - done)
        (turn,) = of_all([loop.timed(count)])
        seconds, sent = seconds + count * turn.seconds, sent + count * turn.sent
        figures = {name: _plain(value) for name, value in loop.tested().items()}
        tests.append({"step": done + count, "seconds": round(seconds, DIGITS), "sent": round(sent), **figures})
    loop.close()
    return tests


def _plain(value: float) -> float | None:
    """Returns the value as JSON data; ``None`` if it is not finite."""
    return round(value, DIGITS) if math.isfinite(value) else None


def summary(plan: Plan, arguments: argparse.Namespace, tests: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the results with the field names of a training's summary."""
    entries = sum(parameter.numel() for parameter in plan.task.build_model().parameters())
    workers, last, own = dist.get_world_size(), tests[-1], {"step", "seconds", "sent"}
    caveat = getattr(getattr(plan.task, "dataset", None), "caveat", None)
    return {
        "case": arguments.case,
        "seed": arguments.seed,
        "gbit": arguments.gbit,
        "metric": plan.task.metric,
        "final": {name: value for name, value in last.items() if name not in own},
        "steps": arguments.steps,
        "workers": workers,
        "batch_size": plan.settings.batch_size,
        "parameters": entries,
        "cluster_seconds": last["seconds"],
        "step_bytes": last["sent"] / arguments.steps,
        "step_bytes_dense": 2 * (workers - 1) / workers * 4 * entries,
        "cores": os.cpu_count(),
        "caveats": [caveat] if caveat else [],
        "evaluations": tests,
    }


def shown(found: Mapping[str, Any]) -> str:
    """Formats the results, one line per test."""
    title = f"{found['case']}, seed {found['seed']}: {found['parameters']:,} parameters, {found['workers']} workers"
    lines = [title, f"{'step':>6}{'seconds':>10}{'MB sent':>10}  {found['metric']}"]
    lines += [
        f"{test['step']:>6}{test['seconds']:>10.2f}{test['sent'] / 1e6:>10.2f}  {test[found['metric']]}"
        for test in found["evaluations"]
    ]
    return "\n".join(lines)


NEEDS_WORKERS = True


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--train", required=True, help="comma-separated choices of train.py")
    parser.add_argument("--case", required=True, help="way to average, as in bench.py hooks")
    parser.add_argument("--seed", type=positive, default=1, help="seed of weights, order and dropout")
    parser.add_argument("--steps", type=positive, required=True, help="training steps")
    parser.add_argument("--every", type=positive, default=20, help="steps between two tests")
    parser.add_argument("--gbit", type=float, help="bandwidth of the links in Gbit/s, only written to the file")


def run(arguments: argparse.Namespace) -> dict[str, Any] | None:
    moves_optimizer(arguments.case)
    plan = planned(arguments.train)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    tests = trained(plan, arguments.case, arguments.seed, arguments.steps, arguments.every)
    found = summary(plan, arguments, tests)
    if dist.get_rank():
        return None
    print(shown(found))
    return found
