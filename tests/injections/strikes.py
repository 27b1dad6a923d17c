"""What happens to a run, and to what it leaves."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from scripts.labs.first_process import tool
from tests.injections.scene import LONG, Scene
from tests.support.driver import BackgroundRun, background_run, pending, processes, stand_still, wait_until
from trainer.checkpoint import list_checkpoints


def kill_a_worker(scene: Scene, runs: Sequence[BackgroundRun]) -> None:
    os.kill(scene.victim(runs), signal.SIGKILL)


def stop_a_worker(scene: Scene, runs: Sequence[BackgroundRun]) -> None:
    os.kill(scene.victim(runs), signal.SIGSTOP)


def kill_the_launcher(scene: Scene, runs: Sequence[BackgroundRun]) -> None:
    os.kill(runs[0].pid, signal.SIGKILL)


def ask_the_launcher(scene: Scene, runs: Sequence[BackgroundRun]) -> None:
    os.kill(runs[0].pid, scene.draw.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP]))


def ask_everybody(scene: Scene, runs: Sequence[BackgroundRun]) -> None:
    """As a terminal that closes, or a scheduler that signals all processes of a job."""
    runs[0].kill(scene.draw.choice([signal.SIGTERM, signal.SIGHUP]))


def press_ctrl_c(scene: Scene, runs: Sequence[BackgroundRun]) -> None:
    runs[0].kill(signal.SIGINT)


def press_ctrl_c_twice(scene: Scene, runs: Sequence[BackgroundRun]) -> None:
    """The first has no effect, because a worker stands still."""
    victim = scene.victim(runs)
    stand_still(victim)
    runs[0].kill(signal.SIGINT)
    wait_until(lambda: runs[0].ended() or pending(victim, signal.SIGUSR1))  # the launcher has passed it on
    time.sleep(1.2)
    if not runs[0].ended():
        runs[0].kill(signal.SIGINT)


def kill_all(scene: Scene, runs: Sequence[BackgroundRun]) -> None:
    runs[0].kill()


def await_the_death(scene: Scene, runs: Sequence[BackgroundRun]) -> None:
    wait_until(lambda: len(runs[0].workers()) < scene.size or runs[0].ended())


def fill_the_disk(scene: Scene, runs: Sequence[BackgroundRun]) -> None:
    """Leaves less space than a checkpoint needs; takes what becomes free when old ones go."""
    whole = sum(path.stat().st_size for path in list_checkpoints(scene.finished / "checkpoints")[-1].iterdir())
    space = int(scene.draw.choice([0.0, scene.draw.random()]) * 0.9 * whole)
    scene.gate.touch()
    with filler(scene).open("wb") as file:
        until = time.monotonic() + LONG
        while not runs[0].ended() and time.monotonic() < until:
            disk = os.statvfs(scene.outputs)
            free = disk.f_bavail * disk.f_frsize - space
            with contextlib.suppress(OSError):  # the run was faster
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, max(1, free))
            time.sleep(0.02)


def filler(scene: Scene) -> Path:
    return scene.outputs / ".filler"


def kill_wandb(scene: Scene, runs: Sequence[BackgroundRun]) -> None:
    signal_wandb(runs[0], signal.SIGKILL)


def stop_wandb(scene: Scene, runs: Sequence[BackgroundRun]) -> None:
    """What stands still cannot end by itself: it is killed when the run has ended."""
    found = signal_wandb(runs[0], signal.SIGSTOP)
    scene.gate.touch()
    wait_until(runs[0].ended)
    for pid in {*found} & {*processes()}:
        os.kill(pid, signal.SIGKILL)


def signal_wandb(run: BackgroundRun, signum: int) -> list[int]:
    """Sends a signal to the processes that W&B starts, possibly also to the training; returns them."""
    wait_until(lambda: services(run) or run.ended())
    found = services(run)
    assert found, run.stderr
    for pid in found:
        os.kill(pid, signum)
    return found


def services(run: BackgroundRun) -> list[int]:
    workers = {str(pid) for pid in run.workers()}
    return [pid for pid, fields in processes().items() if fields[3] in workers and fields[1].startswith("wandb")]


def let_it_be(scene: Scene, runs: Sequence[BackgroundRun]) -> None:
    """The run is in trouble from its beginning."""


def cut_the_link(scene: Scene, runs: Sequence[BackgroundRun]) -> None:
    """Takes down the link of a random worker."""
    turn_the_link(scene, "down")


def cut_the_link_briefly(scene: Scene, runs: Sequence[BackgroundRun]) -> None:
    cut_the_link_for(scene, scene.draw.uniform(0.2, 2.0))


def cut_the_link_for_three_seconds(scene: Scene, runs: Sequence[BackgroundRun]) -> None:
    cut_the_link_for(scene, 3.0)


def cut_the_link_for(scene: Scene, seconds: float) -> None:
    """The run goes on while the link is down."""
    turn_the_link(scene, "down")
    scene.gate.touch()
    time.sleep(seconds)
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


def break_the_summary(scene: Scene) -> str:
    """The run is continued as one that is not finished."""
    assert scene.folder
    write_nonsense(scene.draw, scene.folder / "summary.json")
    return ""


def make_the_summary_a_fifo(scene: Scene) -> str:
    """A reader that opens it would wait for a writer forever."""
    assert scene.folder
    (scene.folder / "summary.json").unlink(missing_ok=True)
    os.mkfifo(scene.folder / "summary.json")
    return ""


def refuse_a_foreign_checkpoint(scene: Scene) -> str:
    """The run refuses the checkpoint in one line and keeps it; it continues once the checkpoint is its own again."""
    manifest = scene.checkpoints[-1] / "manifest.json"
    own = manifest.read_bytes()
    content = json.loads(own)
    content["checkpoint"]["run"] = "0123456789"
    manifest.write_text(json.dumps(content))
    with background_run(*scene.words, folder=scene.logs / "refused") as run:
        assert run.wait() in (1, 2), run.stderr
        reason = "it was saved by run 0123456789, but this is run"
        refusal = rf"error: .*{re.escape(str(manifest.parent))} cannot be used: {reason} .*\n"
        assert re.fullmatch(refusal, run.stderr), run.stderr
    assert json.loads(manifest.read_text()) == content
    manifest.write_bytes(own)
    return ""


def harming(harm: Callable[[random.Random, Path], None], names: Callable[[int], list[str]]) -> Callable[[Scene], str]:
    """Harms a random file of the newest checkpoint; the continued run has to say which one it uses instead."""

    def harm_the_newest(scene: Scene) -> str:
        before, newest = scene.checkpoints[-2:]
        harm(scene.draw, newest / scene.draw.choice(names(scene.size)))
        newest_named, before_named = re.escape(str(newest)), re.escape(str(before))
        return f"warning: checkpoint {newest_named} cannot be used: .*; continuing from {before_named}\n"

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
