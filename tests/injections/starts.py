"""How the run that suffers a fault is started, and where it writes."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

import trainer.checkpoint as checkpointing
from scripts.labs.first_process import Lab, tool
from tests.injections.scene import EVERY, LATEST, Scene
from tests.support import labs
from tests.support.driver import BackgroundRun, background_run
from trainer.observers import Observer, Wandb
from trainer.runs import Run

NEW_NETWORK = 0x40000000  # CLONE_NEWNET


@contextmanager
def started_here(scene: Scene, *words: str, before: Callable[[], None] = lambda: None) -> Iterator[list[BackgroundRun]]:
    """The run with workers that it starts by itself."""

    hold = scene.holding()

    def prepare() -> None:
        hold(0)
        before()

    with background_run(*scene.words, *words, folder=scene.logs / "run", before=prepare) as run:
        yield [run]


@contextmanager
def started_with_sigchld_ignored(scene: Scene, *words: str) -> Iterator[list[BackgroundRun]]:
    """The run as started by a parent that ignores SIGCHLD, which a new process inherits."""

    def ignore() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    with started_here(scene, *words, before=ignore) as runs:
        yield runs


@contextmanager
def dying_while_it_saves(scene: Scene, *words: str) -> Iterator[list[BackgroundRun]]:
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
def started_in_a_lab(scene: Scene, *words: str) -> Iterator[list[BackgroundRun]]:
    """The run with each worker in a separate network namespace, without a common parent, as with torchrun."""
    if reason := labs.missing():
        pytest.skip(reason)
    with ExitStack() as stack:
        scene.logs.mkdir()
        lab = labs.Started(scene.logs)
        stack.callback(lab.end)
        places = [int(labs.processes_in(name)[0]) for name in lab().namespaces]
        (scene.logs / "places").write_text(" ".join(map(str, places)))
        hold = scene.holding()
        yield [
            stack.enter_context(
                background_run(
                    *scene.words, *words, folder=scene.logs / f"rank-{rank}", before=_joining(scene, rank, place, hold)
                )
            )
            for rank, place in enumerate(places)
        ]


def _joining(scene: Scene, rank: int, place: int, hold: Callable[[int], None]) -> Callable[[], None]:
    def join() -> None:
        hold(rank)
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
    done = mount(path, "size=96m")
    if done.returncode:
        pytest.skip(f"cannot mount a small disk: {done.stderr.strip()}")
    try:
        yield
    finally:
        unmount(path)


def mount(path: Path, options: str) -> subprocess.CompletedProcess[str]:
    """Puts a disk in memory there."""
    words = ["mount", "-t", "tmpfs", "-o", options, "small-disk", str(path)]
    return subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)


def unmount(path: Path) -> None:
    subprocess.run(["umount", "--lazy", str(path)], timeout=30, check=True)


@contextmanager
def with_a_folder_of_wandb_that_is_not_writable(scene: Scene, *words: str) -> Iterator[list[BackgroundRun]]:
    """The run with a file, or a folder of which nothing can be changed, where W&B wants to write."""
    if os.geteuid():
        pytest.skip("needs root, to mount a folder that is not writable")
    locked = scene.draw.random() < 0.5
    opened = Wandb.open

    def open_there(logger: Wandb, run: Run, config: Mapping[str, Any]) -> Observer:
        folder = run.folder / "wandb"
        if locked:
            folder.mkdir()
            mount(folder, "ro,size=1m")
        else:
            folder.touch()
        return opened(logger, run, config)

    try:
        with started_here(scene, *words, before=lambda: setattr(Wandb, "open", open_there)) as runs:
            yield runs
    finally:
        if locked and scene.folder:
            unmount(scene.folder / "wandb")


@contextmanager
def without_a_server_of_wandb(scene: Scene, *words: str) -> Iterator[list[BackgroundRun]]:
    """The run with a key for W&B, on a machine without a network, or with a server that refuses or says nothing."""
    if os.geteuid():
        pytest.skip("needs root, to leave the network")
    way = scene.draw.choice(["no network", "refuses", "says nothing"])
    with closing(socket.socket()) as server:
        server.bind(("127.0.0.1", 0))
        if way == "says nothing":
            server.listen()
        address = f"http://127.0.0.1:{server.getsockname()[1]}"

        def prepare() -> None:
            os.environ["WANDB_API_KEY"] = "0" * 40
            if way == "no network":
                leave_the_network()
            else:
                os.environ["WANDB_BASE_URL"] = address

        with started_here(scene, *words, before=prepare) as runs:
            yield runs


def leave_the_network() -> None:
    """Into a namespace that has nothing but its own loopback."""
    assert ctypes.CDLL(None).unshare(NEW_NETWORK) == 0
    subprocess.run([str(tool("ip")), "link", "set", "lo", "up"], timeout=30, check=True)
