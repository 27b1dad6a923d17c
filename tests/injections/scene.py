"""One run that suffers a fault: what is drawn, what is run, and where."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

import trainer.trainer as training
from spardl.clusters import ProcessGroupCluster
from spardl.clusters.process_group import Channel
from tests.support.driver import BackgroundRun, wait_until
from trainer.checkpoint import list_checkpoints
from trainer.learner import Learner
from trainer.rendezvous import Rendezvous

STEPS, EVERY = 18, 3  # steps of a run, and between two of its checkpoints
RUN = (
    f"training.max_steps={STEPS}",
    f"training.checkpoint_every={EVERY}",
    "training.batch_size=4",
    "training.eval_every=0.05",
    "training.eval_examples=32",
)
TIMEOUT = 6.0  # cluster.timeout where a peer falls silent for longer
LONG = 60.0  # where it does not
LATEST = 12  # of the steps after which a fault strikes; the run waits for it before its last one


@dataclass(frozen=True)
class Setup:
    """What is trained, and by how many.

    Attributes:
        name: in the table.
        workers: how many.
        words: of the command line.
        measures: whether groups of layers follow from measured times, and with them what is sent.
    """

    name: str
    workers: int
    words: tuple[str, ...]
    measures: bool = False


SETUPS = (
    Setup("SparDL", 2, ("compressor=spardl",)),
    Setup("dense", 3, ("compressor=none",)),
    Setup("TopkA", 4, ("compressor=topka",)),
    Setup("dense x MG-WFBP", 3, ("compressor=none", "schedule=mg_wfbp"), measures=True),
    Setup("SparDL x DeAR", 2, ("compressor=spardl", "schedule=dear", "schedule.threshold_mb=0.25")),
    Setup("PowerSGD x WFBP", 2, ("compressor=powersgd", "schedule=wfbp", "schedule.bucket_mb=0.25")),
)


@dataclass(frozen=True)
class Phase:
    """A part of a run in which a fault can strike.

    Attributes:
        entries: functions with which it begins, each with its owner and how often it is called in a run.
        exchanges: of how many of its messages the fault may wait.
    """

    entries: tuple[tuple[Any, str, int], ...]
    exchanges: int


PHASES = {
    "starting": Phase(
        (
            (Rendezvous, "_open", 1),
            (Rendezvous, "_greet", 1),
            (dist, "init_process_group", 1),
            (ProcessGroupCluster, "__init__", 1),
        ),
        0,
    ),
    "training": Phase(((Learner, "step", LATEST),), 2),
    "evaluating": Phase(((training, "evaluate", 2),), 2),
    "saving": Phase(((training, "save_checkpoint", LATEST // EVERY),), 2),
}


@dataclass
class Scene:
    """One injection.

    Attributes:
        draw: the injection's own random numbers.
        outputs: folder of all runs; a finished one is there from the beginning.
        finished: that run.
        logs: for what the processes print.
        words: the command line, without what differs from fault to fault.
        size: number of workers.
        phase: in which the fault strikes; ``None`` for after a random step.
        named: the rank that the error has to name, once it is known.
    """

    draw: random.Random
    outputs: Path
    finished: Path
    logs: Path
    words: tuple[str, ...]
    size: int
    phase: str | None = None
    named: int | None = None

    @property
    def gate(self) -> Path:
        """The run does not go on where it is held before this file is there."""
        return self.logs / "gate"

    @property
    def reached(self) -> Path:
        """Where the run tells that it is in the phase."""
        return self.logs / "reached"

    @property
    def struck(self) -> Path:
        """When the fault struck, where the run causes it by itself."""
        return self.logs / "struck"

    @property
    def folder(self) -> Path | None:
        """Of the run that suffers."""
        found = (path for path in self.outputs.iterdir() if path != self.finished and not path.name.startswith("."))
        return next(found, None)

    @property
    def checkpoints(self) -> list[Path]:
        """Its checkpoints, oldest first."""
        return list_checkpoints(self.folder / "checkpoints") if self.folder else []

    @property
    def logged(self) -> int:
        """Steps that it has logged."""
        file = self.folder / "metrics.jsonl" if self.folder else None
        return file.read_text().count('"train"') if file and file.exists() else 0

    def holding(self) -> Callable[[int], None]:
        """What each process of the run does first, given its rank: it sees to it that the run waits for the fault."""
        if self.phase is None:
            return lambda rank: self._hold()
        phase, pausing = PHASES[self.phase], self.draw.randrange(self.size)
        owner, name, most = self.draw.choice(phase.entries)
        times, messages = self.draw.randint(1, most), self.draw.randint(0, phase.exchanges)
        return lambda rank: self._pause(owner, name, times, messages) if rank == pausing else None

    def _hold(self) -> None:
        """Waits before the last step for the fault, however late it comes."""
        step = Learner.step

        def held(learner: Learner, number: int) -> object:
            if number == STEPS - 1:
                wait_until(self.gate.exists)
            return step(learner, number)

        Learner.step = held  # type: ignore[method-assign, assignment]

    def _pause(self, owner: Any, name: str, times: int, messages: int) -> None:
        """Waits in the phase for the fault, when it is entered for the n-th time and has sent so many messages."""
        enter, communicate, left = getattr(owner, name), Channel.communicate, [times, messages]

        def wait() -> None:
            if not self.reached.exists():
                self.reached.touch()
                wait_until(self.gate.exists)

        def entered(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if left == [0, 0]:
                wait()
            return enter(*arguments, **named)

        def communicated(*arguments: Any, **named: Any) -> Any:
            if left[0] <= 0:
                left[1] -= 1
                if left[1] == 0:
                    wait()
            return communicate(*arguments, **named)

        setattr(owner, name, entered)
        if messages:
            Channel.communicate = communicated  # type: ignore[method-assign]

    def victim(self, runs: Sequence[BackgroundRun]) -> int:
        """A random worker of this machine; the error has to name it."""
        self.named = self.draw.randrange(self.size)
        return runs[0].workers()[self.named]
