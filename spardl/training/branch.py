"""A new run that goes on from a checkpoint of another one, with another learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spardl.basics.errors import CheckpointError
from spardl.training.checkpoint import saved_workers, verify_checkpoint
from spardl.training.runs import flat

__all__ = ["FREE", "check_branch"]

# What may differ from the run that saved the checkpoint, nodes or single settings. Of all else, what was saved would
# not fit, or would win in silence over what is typed.
FREE = ("optimizer.lr", "lr_schedule", "training.clip_norm", "training.max_steps", "start_from")


def check_branch(checkpoint: Path, before: Mapping[str, Any], now: Mapping[str, Any], workers: int | None) -> None:
    """Accepts a checkpoint of another run to begin with.

    Args:
        checkpoint: its folder.
        before: what decided the result of the run that saved it.
        now: likewise of the new run.
        workers: how many there are; ``None`` for any number.

    Raises:
        CheckpointError: if the checkpoint is not whole, or the runs differ in more than ``FREE``.
    """
    verify_checkpoint(checkpoint, workers)
    if workers is not None and saved_workers(checkpoint) != workers:
        raise CheckpointError(
            f"start_from={checkpoint} was saved by {saved_workers(checkpoint)} workers, and this run has {workers}; "
            f"use cluster.workers={saved_workers(checkpoint)}"
        )
    step, last = checkpoint.name.removeprefix("step-"), now.get("training", {}).get("max_steps")
    if last is not None and step.isdecimal() and last <= int(step):
        raise CheckpointError(f"start_from={checkpoint} is not before the end, training.max_steps={last}; raise that")
    old, new = dict(flat(before, FREE)), dict(flat(now, FREE))
    for key in sorted(set(old) | set(new)):
        if old.get(key) != new.get(key):
            raise CheckpointError(
                f"start_from={checkpoint}: its run had {key}={old.get(key)}, and this one has {new.get(key)}; only "
                f"{', '.join(FREE[:-1])} may differ"
            )
