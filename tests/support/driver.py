"""Runs ``train.py`` from tests: in this process, in the background, or as a command."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import SystemRandom
from typing import Any

# What a run would import first thing: once here instead of in each process that is forked from this one.
import sklearn.datasets  # noqa: F401
import torch._dynamo  # noqa: F401

import train
import trainer.build
from scripts import choices
from spardl.clusters.workers.processes import exit_now

ROOT = Path(__file__).resolve().parents[2]
# Some tests bring a logger of their own.
trainer.build.KINDS = {
    **trainer.build.KINDS,
    "logger": replace(trainer.build.KINDS["logger"], packages=("trainer", "tests")),
}
QUICK = ("logger=none", "training.log_every=1")
STARTED_BY = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NODELIST")


def composed(*words: str) -> dict[str, Any]:
    """The resolved configuration of a command line, as plain data."""
    with choices.composing():
        return choices.composed(*words)


def here(*words: str) -> int:
    """Runs the command line in this process, which has everything imported; returns the exit code."""
    arguments, handler = sys.argv, signal.getsignal(signal.SIGTERM)
    sweep = words[:1] == ("-m",)
    sys.argv = ["train.py", *words[:sweep], *QUICK, *words[sweep:]]
    try:
        return train.main()
    finally:
        sys.argv = arguments
        signal.signal(signal.SIGTERM, handler)


def command(*words: str, program: tuple[str, ...] = (sys.executable, "train.py"), **options: Any) -> Any:
    """Runs the command line as typed, in a fresh interpreter."""
    environment = {name: value for name, value in os.environ.items() if name not in STARTED_BY}
    environment |= options.pop("env", {})
    return subprocess.run(
        [*program, *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        stdin=subprocess.DEVNULL,
        **options,
    )


class BackgroundRun:
    """The command line in a process of its own, forked from this one, as the leader of a process group.

    Args:
        words: the command line.
        folder: for its output.
        before: called in the new process first.
    """

    def __init__(self, *words: str, folder: Path, before: Callable[[], None] = lambda: None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._files = [folder / "stdout.txt", folder / "stderr.txt"]
        self._code: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._become(words, before)
        wait_until(lambda: processes().get(self.pid, [""] * 5)[4] == str(self.pid))

    def _become(self, words: tuple[str, ...], before: Callable[[], None]) -> None:
        code = 99
        try:
            os.setsid()
            for number, path in enumerate(self._files, 1):
                os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
            # pytest replaced these, and would capture what belongs into the files.
            sys.stdout = os.fdopen(1, "w", closefd=False)
            sys.stderr = os.fdopen(2, "w", closefd=False)
            before()
            code = here(*words)
        finally:
            exit_now(code)

    @property
    def stdout(self) -> str:
        return self._files[0].read_text()

    @property
    def stderr(self) -> str:
        return self._files[1].read_text()

    def ended(self) -> bool:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code is not None

    def wait(self, seconds: float = 120) -> int:
        """Its exit code."""
        wait_until(self.ended, seconds)
        assert self._code is not None
        return self._code

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Sends a signal to the launcher and its workers, all at once."""
        os.killpg(self.pid, signum)

    def workers(self) -> list[int]:
        """Process ids, in the order of the ranks."""
        found = [(fields[21], pid) for pid, fields in processes().items() if fields[3] == str(self.pid)]
        return [pid for _, pid in sorted(found, key=lambda item: (int(item[0]), item[1]))]

    def members(self) -> list[int]:
        """Those of its group that still live."""
        return [pid for pid, fields in processes().items() if fields[4] == str(self.pid) and fields[2] != "Z"]


def processes() -> Mapping[int, list[str]]:
    """The fields of ``/proc/PID/stat``, counted from 0, of every process."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:
            continue
        before, _, after = text.rpartition(")")
        found[int(path.parent.name)] = [*before.split(" (", 1), *after.split()]
    return found


def free_port() -> int:
    """Returns a port without a listener, below those that the kernel gives to other programs."""
    while True:
        port = SystemRandom().randrange(20_000, 32_000)
        with suppress(OSError), closing(socket.create_server(("127.0.0.1", port))):
            return port


def stand_still(pid: int) -> None:
    """Stops a process and waits until it stands still: before that, it may still handle signals that come later."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: processes()[pid][2] == "T")


def pending(pid: int, signum: int) -> bool:
    """Returns whether a process that stands still has yet to handle a signal; one that was killed has not."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    (mask,) = re.findall(r"^ShdPnd:\s*(\w+)$", status, flags=re.MULTILINE)
    return bool(int(mask, 16) >> (signum - 1) & 1)


def wait_until(holds: Callable[[], Any], seconds: float = 120) -> None:
    """Waits for an event; the limit only ends a test that hangs, so it is far longer than a busy machine needs."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, f"not within {seconds} seconds"
        time.sleep(0.005)


@contextmanager
def background_run(*words: str, folder: Path, before: Callable[[], None] = lambda: None) -> Iterator[BackgroundRun]:
    """Starts the command line, and leaves nothing of it behind."""
    started = BackgroundRun(*words, folder=folder, before=before)
    try:
        yield started
    finally:
        if started.members():
            started.kill()
        started.wait()


@contextmanager
def background_ranks(
    words: Iterable[Sequence[str]], environments: Iterable[Mapping[str, str]], folder: Path
) -> Iterator[list[BackgroundRun]]:
    """Starts ``train.py`` as a launcher would: one process for each command line, with variables of its rank."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                background_run(*each, folder=folder / f".rank-{rank}", before=partial(os.environ.update, environment))
            )
            for rank, (each, environment) in enumerate(zip(words, environments, strict=True))
        ]


def only_run(outputs: Path) -> Path:
    (folder,) = (path for path in outputs.iterdir() if not path.name.startswith("."))
    return folder


def steps_logged(outputs: Path) -> int:
    """Steps that the only run has logged, 0 if there is none yet."""
    files = list(outputs.glob("*/metrics.jsonl"))
    return files[0].read_text().count('"train"') if files else 0


def summary(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return content


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def results(folder: Path) -> dict[str, Any]:
    """What must not depend on interruptions, nor on the kind of cluster: no seconds, and no machine."""
    found = summary(folder)
    losses = [(event["step"], event["loss"]) for event in events(folder) if event["kind"] == "train"]
    names = ("status", "weights_sha256", "final", "best", "steps", "step_words", "step_bytes", "density")
    return {**{name: found[name] for name in names}, "losses": losses}
