"""What the frontier is made of: learning curves by steps, paces on links, and whole runs that both are checked by."""

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

__all__ = ["CALM", "TURNS", "Course", "Entrant", "Lesson", "learned", "paced"]

NAME = "frontier"
ACCURACY, HOOKS = "scripts/bench_accuracy.py", "scripts/bench_hooks.py"
# Seconds after which a lab is ended: several times what the longest takes.
LIMIT = 1200.0
# Turns of each case on a link, at a share of dense training's rate: where weights run away, steps take longer.
TURNS, CALM = 5, 0.1
# Seconds that a lab and its workers take to begin; for the plan only, as are the paces of a course.
START = 15.0


class Entrant(NamedTuple):
    """A way to average that takes part. With the first seed its own rate and outer steps ended best of all trials.

    Attributes:
        name: of its rows.
        case: of bench_accuracy.py.
        rate: its learning rate.
        tried: learning rates, where steps are local those of the published outer steps.
        steps: where steps are local, its cases of all outer steps, the published ones first.
        around: learning rates at which outer steps are tried that are not the published ones.
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
        """The case of published outer steps, whose steps are timed: all others compute and send the same."""
        return (*self.steps, self.case)[0]

    @property
    def trials(self) -> Mapping[str, tuple[float, ...]]:
        """Learning rates that are tried, by case."""
        others = dict.fromkeys(self.steps[1:], self.around)
        return {self.published: tuple(sorted({self.rate, *self.tried})), **others}


@dataclass(frozen=True)
class Course:
    """What a scale means for one task.

    Attributes:
        name: of the task, in titles.
        words: of train.py, but for the learning rate.
        entrants: the first one is dense training, of which targets are made.
        gbits: of the links, the slowest first.
        seeds: a learning curve each.
        steps: of every training.
        every: steps between two tests, in a turn, and before the first turn: whole periods of all local steps.
        pace: about how many seconds a step takes on the slowest link; for the plan.
        workers: how many.
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
        """Loss by steps."""
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
        """All of them: every method as it is used first, then what else is tried, then the other seeds."""
        first, *others = self.seeds
        own = [self.lesson(each, each.rate, first) for each in self.entrants]
        tried = [job for each in self.entrants for jobs in self.trials(each).values() for job in jobs.values()]
        rest = [self.lesson(each, each.rate, seed) for seed in others for each in self.entrants]
        return list(dict.fromkeys((*own, *tried, *rest)))

    def trials(self, entrant: Entrant) -> dict[str, dict[float, Lesson]]:
        """What an entrant's learning rate and outer steps are chosen by: case, then rate."""
        return {
            case: {rate: self.lesson(entrant._replace(case=case), rate, self.seeds[0]) for rate in rates}
            for case, rates in entrant.trials.items()
        }

    def pacing(self, gbit: float) -> Measurement:
        """Seconds and bytes of a step of all entrants, in turns, on one link."""
        cases = (ALONE, *dict.fromkeys(entrant.published for entrant in self.entrants))
        counts = ("--seeds", "1", "--settle", str(self.every), "--rounds", str(TURNS), "--steps", str(self.every))
        words = (HOOKS, *counts, "--train", self.train(CALM * self.entrants[0].rate), "--cases", *cases)
        arguments = (("workers", self.workers), ("gbit", gbit), ("limit", LIMIT), ("words", words))
        seconds = START + self.pace * self.every * (1 + TURNS) * len(cases) / 2
        return Measurement(f"{NAME}.paced", paced, arguments, typed(self.workers, gbit, words), 1, seconds)

    def whole(self, entrant: Entrant, gbit: float) -> Lap:
        """The whole training of an entrant on a link, by the clock."""
        words = self._words(entrant, entrant.rate, self.seeds[0])
        arguments = (("workers", self.workers), ("gbit", gbit), ("limit", LIMIT), ("words", words))
        shell = typed(self.workers, gbit, words)
        return Lap(f"{NAME}.whole", raced, arguments, shell, 1, START + self.steps * self.pace)

    def wholes(self) -> list[tuple[Entrant, float]]:
        """Which are trained whole, and on which links."""
        ends = dict.fromkeys((self.gbits[0], self.gbits[-1]))
        return [(entrant, gbit) for gbit in ends for entrant in self.entrants if entrant.whole]


@dataclass(frozen=True)
class Lesson(Computation):
    """A learning curve, without seconds: on no link would it be another one."""

    def recalled(self, content: Mapping[str, Any], where: Path) -> Outcome:
        """The result in a record; ``None`` if the job would no longer give it."""
        result = content["result"]
        lines = [{"kind": "eval", **test} for test in result["evaluations"]]
        return Outcome(where, result, made=content["environment"], lines=lines)


def learned(workers: int, case: str, seed: int, steps: int, every: int, train: str) -> dict[str, Any]:
    """What a training comes to, test by test: by real processes on this machine, whatever else it does.

    Args:
        workers: how many.
        case: of bench_accuracy.py.
        seed: of weights, order and dropout.
        steps: of the training.
        every: steps between two tests.
        train: choices of train.py.

    Raises:
        SpardlError: if it cannot be done.
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
    """Seconds of a step and bytes that a worker sends in it, of each case, turn by turn.

    Args:
        setting: see :func:`in_lab`; the bench is bench_hooks.py.
    """
    rows = in_lab(**setting)["rows"]
    return {"cases": {row["case"]: {"seconds": _short(row["seconds"]), "sent": _short(row["sent"])} for row in rows}}


def _short(figures: Sequence[float]) -> list[float]:
    """To five digits, which is more than a clock knows."""
    return [float(f"{figure:.5g}") if math.isfinite(figure) else figure for figure in figures]
