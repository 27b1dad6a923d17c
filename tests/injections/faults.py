"""The table of faults."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.injections.scene import EVERY, LONG, PHASES, SETUPS, TIMEOUT, Scene, Setup
from tests.injections.starts import (
    a_folder,
    a_small_disk,
    dying_while_it_saves,
    started_here,
    started_in_a_lab,
    started_with_sigchld_ignored,
    with_a_folder_of_wandb_that_is_not_writable,
    without_a_server_of_wandb,
)
from tests.injections.strikes import (
    ask_everybody,
    ask_the_launcher,
    await_the_death,
    break_the_summary,
    cut_short,
    cut_the_link,
    cut_the_link_briefly,
    cut_the_link_for_three_seconds,
    empty_the_disk,
    fill_the_disk,
    flip_a_bit,
    harming,
    kill_a_worker,
    kill_all,
    kill_the_launcher,
    kill_wandb,
    let_it_be,
    make_the_summary_a_fifo,
    nothing,
    press_ctrl_c,
    press_ctrl_c_twice,
    refuse_a_foreign_checkpoint,
    remove,
    stop_a_worker,
    stop_wandb,
    tensors,
    write_nonsense,
)
from tests.support.driver import BackgroundRun


@dataclass(frozen=True)
class Fault:
    """One kind of fault, and what is expected after it.

    Attributes:
        name: what happens, in words.
        injections: how many there are in the table of the docs, each with a seed of its own.
        tried: how many of them the slow tests try.
        strike: causes it.
        start: starts the run; given the scene and more words for the command line.
        codes: what the run's processes may end with: -9 killed, 0 finished, in spite of it.
        says: all that each of them prints to standard error; ``RANK`` stands for the rank that was hit.
        after: mends or makes worse what is left, before the run is continued; returns what that prints.
        words: more of the command line.
        setups: what is trained; they take turns.
        phase: of the run, in which it strikes; ``None`` for after a random step.
        earliest: the first step after which it strikes.
        outputs: makes the folder of all runs.
        mark: the marker under which pytest runs it.
        keeps: the checkpoint that a run goes on from, counted from the newest.
    """

    name: str
    injections: int
    tried: int
    strike: Callable[[Scene, Sequence[BackgroundRun]], None]
    start: Callable[..., contextlib.AbstractContextManager[list[BackgroundRun]]] = started_here
    codes: tuple[int, ...] = (1,)
    says: str = ""
    after: Callable[[Scene], str] = nothing
    words: tuple[str, ...] = (f"cluster.timeout={LONG}",)
    setups: tuple[Setup, ...] = SETUPS
    phase: str | None = None
    earliest: int = 1
    outputs: Callable[[Path], contextlib.AbstractContextManager[None]] = a_folder
    mark: str = "slow"
    keeps: int = 1

    @property
    def survived(self) -> bool:
        """Whether the run finishes in spite of it."""
        return self.codes == (0,)


SHORT = (f"cluster.timeout={TIMEOUT}",)
STOPPED = r"stopped at step \d+ of \d+ on request; all state is saved; the same command with resume=auto continues\n"
INTERRUPTED = (
    r"error: interrupted(; the same command with resume=auto continues after step \d+"
    r"| before the first checkpoint; the same command starts a new run)\n"
)
KILLED = r"error: worker RANK was killed by SIGKILL at step \d+; the other workers were stopped\n"
BROKEN = {"strike": kill_all, "codes": (-9,), "earliest": 2 * EVERY + 1, "keeps": 2}
LAB = {"start": started_in_a_lab, "setups": tuple(one for one in SETUPS if one.workers == 2), "mark": "netlab"}
SURVIVED = {"codes": (0,)}
OFF, OFFLINE = "warning: Wandb failed and is now disabled: ", "warning: W&B cannot be reached, logging offline: "


def wandb(mode: str, timeout: int) -> dict[str, Any]:
    """What is expected of a run whose logger is in trouble."""
    words = (f"cluster.timeout={LONG}", "logger=wandb", f"logger.mode={mode}", f"logger.timeout={timeout}")
    return {**SURVIVED, "words": words}


FAULTS = (
    Fault("a worker is killed", 60, 2, kill_a_worker, says=KILLED),
    Fault("a worker is killed while it saves a checkpoint", 24, 1, await_the_death, dying_while_it_saves, says=KILLED),
    Fault("the launcher is killed", 48, 1, kill_the_launcher, codes=(-9,)),
    Fault("SIGTERM, SIGUSR1 or SIGHUP, to the launcher", 40, 1, ask_the_launcher, codes=(75, 0), says=f"({STOPPED})?"),
    Fault("SIGTERM or SIGHUP, to all processes", 30, 1, ask_everybody, codes=(75, 0), says=f"({STOPPED})?"),
    Fault("Ctrl-C", 36, 1, press_ctrl_c, codes=(130, 0), says=f"({STOPPED})?"),
    Fault("Ctrl-C twice, while a worker stands still", 18, 1, press_ctrl_c_twice, codes=(130,), says=INTERRUPTED),
    Fault("SIGCHLD is ignored by the parent", 12, 1, let_it_be, started_with_sigchld_ignored, **SURVIVED),
    Fault(
        "SIGCHLD is ignored by the parent, and a worker is killed",
        18,
        1,
        kill_a_worker,
        started_with_sigchld_ignored,
        says=KILLED,
    ),
    Fault("summary.json is empty, or nonsense", 18, 1, kill_all, codes=(-9,), after=break_the_summary),
    Fault("summary.json is a FIFO", 6, 1, kill_all, codes=(-9,), after=make_the_summary_a_fifo),
    Fault(
        "the newest checkpoint belongs to another run",
        12,
        1,
        kill_all,
        codes=(-9,),
        earliest=EVERY + 1,
        after=refuse_a_foreign_checkpoint,
    ),
    Fault(
        "a worker stands still for longer than the timeout",
        12,
        1,
        stop_a_worker,
        says=r"error: worker RANK stopped answering at step \d+\n",
        words=SHORT,
    ),
    Fault(
        "the disk is full",
        12,
        1,
        fill_the_disk,
        says=r"error: worker \d failed at step \d+: cannot write \S+: No space left on device; free some space, "
        r"then continue with the same command and resume=auto\n",
        after=empty_the_disk,
        outputs=a_small_disk,
    ),
    Fault("a file of the newest checkpoint is cut short", 18, 1, after=harming(cut_short, tensors), **BROKEN),
    Fault("a bit of the newest checkpoint flips", 18, 1, after=harming(flip_a_bit, tensors), **BROKEN),
    Fault("a file of the newest checkpoint is missing", 12, 1, after=harming(remove, tensors), **BROKEN),
    Fault(
        "the newest checkpoint's manifest is empty, or nonsense",
        18,
        1,
        after=harming(write_nonsense, lambda size: ["manifest.json"]),
        **BROKEN,
    ),
    Fault("W&B's service is killed", 8, 1, kill_wandb, says=rf"{OFF}.*\n", **wandb("offline", 1)),
    Fault(
        "W&B's service stands still",
        8,
        1,
        stop_wandb,
        says=rf"{OFF}no answer within \d+ seconds\n",
        **wandb("offline", 1),
    ),
    Fault(
        "W&B's folder is not writable",
        6,
        1,
        let_it_be,
        with_a_folder_of_wandb_that_is_not_writable,
        says=rf"{OFF}\[Errno \d+\] (Read-only file system|Not a directory).*\n",
        **wandb("offline", 10),
    ),
    Fault(
        "W&B has a key, but no server answers",
        9,
        1,
        let_it_be,
        without_a_server_of_wandb,
        says=rf"(wandb: .*\n)?(({OFF}no answer within \d+ seconds|{OFFLINE}.*)\n)+",
        **wandb("online", 4),
    ),
    Fault("a worker's link is down, for less than the timeout", 6, 1, cut_the_link_briefly, **SURVIVED, **LAB),
    Fault("a worker's link is down, for longer", 6, 1, cut_the_link, says=r"error: .*\n", words=SHORT, **LAB),
    *(
        Fault(
            f"a worker's link is down for 3 s, while {phase}",
            6,
            1,
            cut_the_link_for_three_seconds,
            phase=phase,
            **SURVIVED,
            **LAB,
        )
        for phase in PHASES
    ),
    *(
        Fault(
            f"a worker's link is down for ever, while {phase}",
            6,
            1,
            cut_the_link,
            # Who does not meet the others at all cannot know that its address is right.
            codes=(1, 2) if phase == "starting" else (1,),
            says=r"error: .*\n",
            words=SHORT,
            phase=phase,
            **LAB,
        )
        for phase in PHASES
    ),
)
