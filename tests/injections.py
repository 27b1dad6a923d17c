"""Faults for real runs: how each is caused at a random moment, and what is expected of a run that suffers it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import spardl.training.checkpoint as checkpointing
from scripts.netlab_inside import Lab, tool
from spardl.training.checkpoint import list_checkpoints
from spardl.training.learner import Learner
from tests import labs
from tests.driver import Beside, beside, processes, wait_until

STEPS, EVERY = 18, 3  # steps of a run, and between two of its checkpoints
RUN = (
    f"training.max_steps={STEPS}",
    f"training.checkpoint_every={EVERY}",
    "training.batch_size=4",
    "training.eval_every=0.05",
    "training.eval_examples=32",
)
SETUPS = {
    2: ("cluster.workers=2", "compressor=spardl"),
    3: ("cluster.workers=3", "compressor=none"),
    4: ("cluster.workers=4", "compressor=topka"),
}
TIMEOUT = 3.0  # cluster.timeout where a peer falls silent for longer
LONG = 30.0  # where it does not
LATEST = 12  # of the steps after which a fault strikes; the run waits for it before its last one


@dataclass
class Scene:
    """One injection: what is drawn, what is run, and where.

    Attributes:
        draw: the injection's own random numbers.
        outputs: folder of all runs; a finished one is there from the beginning.
        finished: that run.
        logs: for what the processes print.
        words: the command line, without what differs from fault to fault.
        size: number of workers.
        named: the rank that the error has to name, once it is known.
    """

    draw: random.Random
    outputs: Path
    finished: Path
    logs: Path
    words: tuple[str, ...]
    size: int
    named: int | None = None

    @property
    def gate(self) -> Path:
        """The run does not do its last step before this file is there."""
        return self.logs / "gate"

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

    def hold(self) -> None:
        """In the process of a run: waits before the last step for the fault, however late it comes."""
        step = Learner.step

        def held(learner: Learner, number: int) -> object:
            if number == STEPS - 1:
                wait_until(self.gate.exists)
            return step(learner, number)

        Learner.step = held  # type: ignore[method-assign, assignment]

    def victim(self, runs: Sequence[Beside]) -> int:
        """A random worker of this machine; the error has to name it."""
        self.named = self.draw.randrange(self.size)
        return runs[0].workers()[self.named]


@contextmanager
def started_here(scene: Scene, *words: str, before: Callable[[], None] = lambda: None) -> Iterator[list[Beside]]:
    """The run with workers that it starts by itself."""

    def prepare() -> None:
        scene.hold()
        before()

    with beside(*scene.words, *words, folder=scene.logs / "run", before=prepare) as run:
        yield [run]


@contextmanager
def dying_while_it_saves(scene: Scene, *words: str) -> Iterator[list[Beside]]:
    """The run with a worker that is killed while it writes a file of a checkpoint, or right after that."""
    step = EVERY * scene.draw.randrange(1, LATEST // EVERY + 1)
    name = scene.draw.choice(["shared.pt", "manifest.json", *(f"rank-{rank}.pt" for rank in range(scene.size))])
    scene.named = int(name[5]) if name.startswith("rank") else 0
    share = scene.draw.choice([0.0, scene.draw.random(), 1.0])
    write = checkpointing.write_atomically

    def cut(path: Path, data: bytes | memoryview) -> None:
        if path.name != name or path.parent.name != f".step-{step:08d}":
            write(path, data)
            return
        if share == 1.0:
            write(path, data)
        else:
            path.with_name(f".{name}.{os.getpid()}.tmp").write_bytes(bytes(data)[: int(share * len(data))])
        scene.struck.write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    with started_here(scene, *words, before=lambda: setattr(checkpointing, "write_atomically", cut)) as runs:
        yield runs


@contextmanager
def started_in_a_lab(scene: Scene, *words: str) -> Iterator[list[Beside]]:
    """The run with each worker in a network namespace of its own; nobody's child, as with torchrun."""
    if reason := labs.missing():
        pytest.skip(reason)
    with ExitStack() as stack:
        scene.logs.mkdir()
        lab = labs.Started(scene.logs)
        stack.callback(lab.end)
        places = [int(labs.processes_in(name)[0]) for name in lab().namespaces]
        (scene.logs / "places").write_text(" ".join(map(str, places)))
        yield [
            stack.enter_context(
                beside(*scene.words, *words, folder=scene.logs / f"rank-{rank}", before=_joining(scene, rank, place))
            )
            for rank, place in enumerate(places)
        ]


def _joining(scene: Scene, rank: int, place: int) -> Callable[[], None]:
    def join() -> None:
        scene.hold()
        os.environ.update(Lab(scene.size, float("inf"), 60.0).environment(rank))
        kinds = ["net"]
        if Path("/proc/self/ns/user").readlink() != Path(f"/proc/{place}/ns/user").readlink():
            kinds.insert(0, "user")
        for kind in kinds:  # os.setns is in Python from 3.12 on
            with Path(f"/proc/{place}/ns/{kind}").open() as file:
                assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0

    return join


@contextmanager
def a_folder(path: Path) -> Iterator[None]:
    """Outputs on an ordinary disk."""
    path.mkdir()
    yield


@contextmanager
def a_small_disk(path: Path) -> Iterator[None]:
    """Outputs on a disk of their own, in memory."""
    path.mkdir()
    if os.geteuid():
        pytest.skip("needs root, to mount a small disk")
    mounting = ["mount", "-t", "tmpfs", "-o", "size=96m", "small-disk", str(path)]
    done = subprocess.run(mounting, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a small disk: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], timeout=30, check=True)


def kill_a_worker(scene: Scene, runs: Sequence[Beside]) -> None:
    os.kill(scene.victim(runs), signal.SIGKILL)


def stop_a_worker(scene: Scene, runs: Sequence[Beside]) -> None:
    os.kill(scene.victim(runs), signal.SIGSTOP)


def kill_the_launcher(scene: Scene, runs: Sequence[Beside]) -> None:
    os.kill(runs[0].pid, signal.SIGKILL)


def kill_all(scene: Scene, runs: Sequence[Beside]) -> None:
    runs[0].kill()


def await_the_death(scene: Scene, runs: Sequence[Beside]) -> None:
    wait_until(lambda: len(runs[0].workers()) < scene.size or runs[0].ended())


def fill_the_disk(scene: Scene, runs: Sequence[Beside]) -> None:
    """Leaves less room than a checkpoint needs; takes what becomes free when old ones go, too."""
    whole = sum(path.stat().st_size for path in list_checkpoints(scene.finished / "checkpoints")[-1].iterdir())
    room = int(scene.draw.choice([0.0, scene.draw.random()]) * 0.9 * whole)
    scene.gate.touch()
    with filler(scene).open("wb") as file:
        until = time.monotonic() + LONG
        while not runs[0].ended() and time.monotonic() < until:
            disk = os.statvfs(scene.outputs)
            free = disk.f_bavail * disk.f_frsize - room
            with contextlib.suppress(OSError):  # the run was faster
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, max(1, free))
            time.sleep(0.02)


def filler(scene: Scene) -> Path:
    return scene.outputs / ".filler"


def kill_wandb(scene: Scene, runs: Sequence[Beside]) -> None:
    """Kills the processes that W&B has started."""
    workers = {str(pid) for pid in runs[0].workers()}
    found = [pid for pid, fields in processes().items() if fields[3] in workers and fields[1].startswith("wandb")]
    assert found
    for pid in found:
        os.kill(pid, signal.SIGKILL)


def cut_the_link(scene: Scene, runs: Sequence[Beside]) -> None:
    """Takes down the link of a random worker."""
    turn_the_link(scene, "down")


def cut_the_link_briefly(scene: Scene, runs: Sequence[Beside]) -> None:
    turn_the_link(scene, "down")
    time.sleep(scene.draw.uniform(0.2, 2.0))
    turn_the_link(scene, "up")


def turn_the_link(scene: Scene, way: str) -> None:
    places = (scene.logs / "places").read_text().split()
    scene.named = scene.draw.randrange(scene.size) if scene.named is None else scene.named
    entering = ["nsenter", "--target", places[scene.named], *(["--user"] if os.geteuid() else []), "--net"]
    subprocess.run([*entering, str(tool("ip")), "link", "set", "eth0", way], timeout=30, check=True)


def nothing(scene: Scene) -> str:
    return ""


def empty_the_disk(scene: Scene) -> str:
    filler(scene).unlink()
    return ""


def harming(harm: Callable[[random.Random, Path], None], names: Callable[[int], list[str]]) -> Callable[[Scene], str]:
    """Harms a random file of the newest checkpoint; the continued run has to say which one it uses instead."""

    def harm_the_newest(scene: Scene) -> str:
        before, newest = scene.checkpoints[-2:]
        harm(scene.draw, newest / scene.draw.choice(names(scene.size)))
        newest_named, before_named = re.escape(str(newest)), re.escape(str(before))
        return f"warning: checkpoint {newest_named} cannot be used: .*; going on from {before_named}\n"

    return harm_the_newest


def tensors(size: int) -> list[str]:
    return ["shared.pt", *(f"rank-{rank}.pt" for rank in range(size))]


def cut_short(draw: random.Random, path: Path) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size))


def flip_a_bit(draw: random.Random, path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def remove(draw: random.Random, path: Path) -> None:
    path.unlink()


def write_nonsense(draw: random.Random, path: Path) -> None:
    path.write_bytes(
        draw.choice([b"", b"{}", b"[]", b"null", b"7", b'{"shared.pt": ', b"\xff\xfe\x00", b'{"shared.pt": 1}'])
    )


@dataclass(frozen=True)
class Fault:
    """One kind of fault, and what is expected after it.

    Attributes:
        name: what happens, in words.
        injections: how many, each with a seed of its own.
        strike: causes it.
        start: starts the run; given the scene and more words for the command line.
        code: what the run's processes end with: -9 killed, 0 finished, in spite of it.
        says: all that each of them prints to standard error; ``RANK`` stands for the rank that was hit.
        after: mends or makes worse what is left, before the run is continued; returns what that prints.
        words: more of the command line.
        sizes: numbers of workers to draw from.
        earliest: the first step after which it strikes.
        outputs: makes the folder of all runs.
        mark: the marker under which pytest runs it.
        keeps: the checkpoint that a run goes on from, counted from the newest.
    """

    name: str
    injections: int
    strike: Callable[[Scene, Sequence[Beside]], None]
    start: Callable[..., contextlib.AbstractContextManager[list[Beside]]] = started_here
    code: int = 1
    says: str = ""
    after: Callable[[Scene], str] = nothing
    words: tuple[str, ...] = (f"cluster.timeout={LONG}",)
    sizes: tuple[int, ...] = tuple(SETUPS)
    earliest: int = 1
    outputs: Callable[[Path], contextlib.AbstractContextManager[None]] = a_folder
    mark: str = "slow"
    keeps: int = 1


SHORT = (f"cluster.timeout={TIMEOUT}",)
KILLED = r"error: worker RANK was killed by SIGKILL at step \d+; the other workers were stopped\n"
BROKEN = {"strike": kill_all, "code": -9, "earliest": 2 * EVERY + 1, "keeps": 2}
LAB = {"start": started_in_a_lab, "sizes": (2,), "mark": "netlab"}
FAULTS = (
    Fault("a worker is killed", 5, kill_a_worker, says=KILLED),
    Fault("a worker is killed while it saves a checkpoint", 5, await_the_death, dying_while_it_saves, says=KILLED),
    Fault("the launcher is killed", 4, kill_the_launcher, code=-9),
    Fault(
        "a worker stands still for longer than the timeout",
        4,
        stop_a_worker,
        says=r"error: worker RANK did not answer any more at step \d+\n",
        words=SHORT,
    ),
    Fault(
        "the disk is full",
        4,
        fill_the_disk,
        says=r"error: worker \d failed at step \d+: cannot write \S+: No space left on device; make room there, and "
        r"the same command with resume=auto goes on\n",
        after=empty_the_disk,
        outputs=a_small_disk,
    ),
    Fault("a file of the newest checkpoint is cut short", 2, after=harming(cut_short, tensors), **BROKEN),
    Fault("a bit of the newest checkpoint flips", 2, after=harming(flip_a_bit, tensors), **BROKEN),
    Fault("a file of the newest checkpoint is missing", 2, after=harming(remove, tensors), **BROKEN),
    Fault(
        "the newest checkpoint's manifest is empty, or nonsense",
        3,
        after=harming(write_nonsense, lambda size: ["manifest.json"]),
        **BROKEN,
    ),
    Fault(
        "W&B's service is killed",
        3,
        kill_wandb,
        code=0,
        says=r"warning: Wandb failed and is off from here on: .*\n",
        words=("logger=wandb", "logger.mode=offline", "logger.timeout=1"),
    ),
    Fault(
        "a worker's link is down, for less than the timeout",
        3,
        cut_the_link_briefly,
        code=0,
        words=(f"cluster.timeout={LONG}",),
        **LAB,
    ),
    Fault("a worker's link is down, for longer", 3, cut_the_link, says=r"error: .*\n", words=SHORT, **LAB),
)
