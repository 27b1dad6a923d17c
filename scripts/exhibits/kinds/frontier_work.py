"""Jobs of the frontier: learning curves by step, step times on links, and whole trainings that check both."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch.distributed as dist

from scripts.bench_accuracy import trained
from scripts.benchmarks.ddp_hooks import ALONE, TIMEOUT
from scripts.benchmarks.plain_loop import planned
from scripts.exhibits.jobs import Computation, Outcome
from scripts.exhibits.kinds.benches import local
from scripts.exhibits.kinds.lab import Measurement, in_lab, typed
from scripts.exhibits.kinds.races import Lap, raced
from spardl.basics.files import write_atomically
from spardl.clusters.workers.processes import run_processes

NAME = "frontier"
ACCURACY, HOOKS = "scripts/bench_accuracy.py", "scripts/bench_hooks.py"
# Time limit of a lab in seconds: several times the duration of the longest one.
LIMIT = 1200.0
# Turns of each case on a link, at a share of the dense learning rate: steps take longer if weights diverge.
TURNS, CALM = 5, 0.1
# Startup time of a lab and its workers in seconds; only for the plan, as are the step times of a course.
START = 15.0


class Entrant(NamedTuple):
    """A way to average, with the learning rate and outer steps that ended best of all trials with the first seed.

    Attributes:
        name: Name of its rows.
        case: Case of bench_accuracy.py.
        rate: Learning rate.
        tried: Tried learning rates; with local steps, those for the published outer steps.
        steps: With local steps, the cases of all outer steps, the published ones first.
        around: Learning rates at which the other outer steps are tried.
        whole: Whether whole trainings on the slowest and the fastest link check the combined seconds.
    """

    name: str
    case: str
    rate: float
    tried: tuple[float, ...]
    steps: tuple[str, ...] = ()
    around: tuple[float, ...] = ()
    whole: bool = False

    @property
    def published(self) -> str:
        """Case with published outer steps; only its steps are timed, because all others have equal costs."""
        return (*self.steps, self.case)[0]

    @property
    def trials(self) -> Mapping[str, tuple[float, ...]]:
        """Tried learning rates by case."""
        others = dict.fromkeys(self.steps[1:], self.around)
        return {self.published: tuple(sorted({self.rate, *self.tried})), **others}


@dataclass(frozen=True)
class Course:
    """Plan of one size preset for one task.

    Attributes:
        name: Name of the task in titles.
        words: Arguments of train.py without the learning rate.
        entrants: Entrants; the first one is dense training, which determines the targets.
        gbits: Bandwidths of the links in Gbit/s, the slowest first.
        seeds: Seeds, with one learning curve each.
        steps: Number of steps of each training.
        every: Steps between two tests, per turn and before the first turn; a multiple of all periods of local steps.
        pace: Approximate seconds of a step on the slowest link, for the plan.
        workers: Number of workers.
    """

    name: str
    words: tuple[str, ...]
    entrants: tuple[Entrant, ...]
    gbits: tuple[float, ...]
    seeds: tuple[int, ...]
    steps: int
    every: int
    pace: float
    workers: int = 4

    def train(self, rate: float) -> str:
        """Choices of train.py with a learning rate."""
        return ",".join((*self.words, f"optimizer.lr={rate:g}"))

    def _words(self, entrant: Entrant, rate: float, seed: int) -> tuple[str, ...]:
        counts = ("--steps", str(self.steps), "--every", str(self.every), "--seed", str(seed))
        return (ACCURACY, "--case", entrant.case, *counts, "--train", self.train(rate))

    def lesson(self, entrant: Entrant, rate: float, seed: int) -> Lesson:
        """Job of a learning curve: loss by step."""
        given = {
            "workers": self.workers,
            "case": entrant.case,
            "seed": seed,
            "steps": self.steps,
            "every": self.every,
            "train": self.train(rate),
        }
        start = " ".join(("torchrun", *local(self.workers)))
        shell = f"{start} {' '.join(self._words(entrant, rate, seed))}"
        return Lesson(f"{NAME}.learned", learned, tuple(given.items()), shell)

    def lessons(self) -> list[Lesson]:
        """All learning curves: chosen settings first, then the other tried settings, then the other seeds."""
        first, *others = self.seeds
        own = [self.lesson(each, each.rate, first) for each in self.entrants]
        tried = [job for each in self.entrants for jobs in self.trials(each).values() for job in jobs.values()]
        rest = [self.lesson(each, each.rate, seed) for seed in others for each in self.entrants]
        return list(dict.fromkeys((*own, *tried, *rest)))

    def trials(self, entrant: Entrant) -> dict[str, dict[float, Lesson]]:
        """Learning curves that determine learning rate and outer steps of an entrant, by case and rate."""
        return {
            case: {rate: self.lesson(entrant._replace(case=case), rate, self.seeds[0]) for rate in rates}
            for case, rates in entrant.trials.items()
        }

    def pacing(self, gbit: float) -> Measurement:
        """Job that measures seconds and bytes per step of all entrants in turns on one link."""
        cases = (ALONE, *dict.fromkeys(entrant.published for entrant in self.entrants))
        counts = ("--seeds", "1", "--settle", str(self.every), "--rounds", str(TURNS), "--steps", str(self.every))
        words = (HOOKS, *counts, "--train", self.train(CALM * self.entrants[0].rate), "--cases", *cases)
        arguments = (("workers", self.workers), ("gbit", gbit), ("limit", LIMIT), ("words", words))
        seconds = START + self.pace * self.every * (1 + TURNS) * len(cases) / 2
        return Measurement(f"{NAME}.paced", paced, arguments, typed(self.workers, gbit, words), 1, seconds)

    def whole(self, entrant: Entrant, gbit: float) -> Lap:
        """Job of a whole timed training of an entrant on a link."""
        words = self._words(entrant, entrant.rate, self.seeds[0])
        arguments = (("workers", self.workers), ("gbit", gbit), ("limit", LIMIT), ("words", words))
        shell = typed(self.workers, gbit, words)
        return Lap(f"{NAME}.whole", raced, arguments, shell, 1, START + self.steps * self.pace)

    def wholes(self) -> list[tuple[Entrant, float]]:
        """Entrants with whole timed trainings, and their links."""
        ends = dict.fromkeys((self.gbits[0], self.gbits[-1]))
        return [(entrant, gbit) for gbit in ends for entrant in self.entrants if entrant.whole]


@dataclass(frozen=True)
class Lesson(Computation):
    """A learning curve by step, which does not depend on the link."""

    def recalled(self, content: Mapping[str, Any], where: Path) -> Outcome:
        result = content["result"]
        lines = [{"kind": "eval", **test} for test in result["evaluations"]]
        return Outcome(where, result, made=content["environment"], lines=lines)


def learned(workers: int, case: str, seed: int, steps: int, every: int, train: str) -> dict[str, Any]:
    """Test results of a training with real processes on this machine, whose other load does not matter.

    Args:
        workers: Number of workers.
        case: Case of bench_accuracy.py.
        seed: Seed of weights, order and dropout.
        steps: Number of training steps.
        every: Steps between two tests.
        train: Choices of train.py.

    Raises:
        SpardlError: if the training fails.
    """
    plan = planned(train)
    with TemporaryDirectory() as name:
        folder = Path(name)

        def work(rank: int, heartbeat: Callable[[int], None]) -> None:
            store = dist.FileStore(str(folder / "store"), workers)  # type: ignore[attr-defined]
            dist.init_process_group("gloo", None, timedelta(seconds=TIMEOUT), workers, rank, store)
            tests = trained(plan, case, seed, steps, every)
            if rank == 0:
                write_atomically(folder / "tests.json", json.dumps(tests).encode())
            dist.barrier()

        run_processes(workers, work, folder)
        tests = json.loads((folder / "tests.json").read_bytes())
    entries = sum(parameter.numel() for parameter in plan.task.build_model().parameters())
    untimed = [{name: value for name, value in test.items() if name not in ("seconds", "sent")} for test in tests]
    return {"metric": plan.task.metric, "steps": steps, "parameters": entries, "evaluations": untimed}


def paced(**setting: Any) -> dict[str, Any]:
    """Seconds and bytes sent per worker and step of each case, by turn.

    Args:
        setting: Arguments of :func:`in_lab`; the benchmark is bench_hooks.py.
    """
    rows = in_lab(**setting)["rows"]
    return {"cases": {row["case"]: {"seconds": _short(row["seconds"]), "sent": _short(row["sent"])} for row in rows}}


def _short(figures: Sequence[float]) -> list[float]:
    """Rounds to five digits, which exceeds the precision of the clock."""
    return [float(f"{figure:.5g}") if math.isfinite(figure) else figure for figure in figures]
