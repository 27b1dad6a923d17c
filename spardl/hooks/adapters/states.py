"""Shared parts of the integrations: finds the DDP model, and stores workers' states next to a trainer's checkpoint."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from spardl.basics.errors import CheckpointError, ConfigError
from spardl.basics.files import open_regular, write_atomically
from spardl.hooks.hook import Hook, attach
from spardl.method.method import Method
from spardl.method.recipes import make_method

__all__ = ["distributed", "load_state", "method_of", "save_state", "state_file"]


def distributed(model: nn.Module, launcher: str) -> DistributedDataParallel:
    """Returns the DDP model that a trainer has wrapped; the error names ``launcher``, the command that starts workers.

    Raises:
        ConfigError: If the model is not a ``DistributedDataParallel``.
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile() wraps the DDP model
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(
            f"the model is a {type(model).__name__} and not a DistributedDataParallel; start several workers "
            f"({launcher}) without another parallel strategy"
        )
    return model


def method_of(method: str | Method, options: Mapping[str, Any]) -> Method:
    """Returns the method that ``attach`` would use for these arguments, without attaching it.

    Args:
        method: Name of a method, or a method.
        options: Options of ``attach`` and of the method.

    Raises:
        ConfigError: If the method or an option is unknown.
    """
    own = signature(attach).parameters
    return make_method(method, **{key: each for key, each in options.items() if key not in own})


class _Read(NamedTuple):
    """Result of reading a state file: its step or an error message; both are ``None`` if the file may be missing."""

    step: int | None
    fault: str | None


def state_file(folder: Path, prefix: str = "spardl") -> Path:
    """Returns the path of this worker's state file, whether or not it exists.

    Args:
        folder: Folder of a checkpoint.
        prefix: Prefix of the file name.
    """
    return folder / f"{prefix}-{dist.get_rank()}-of-{dist.get_world_size()}.pt"


def save_state(handle: Hook, folder: Path, prefix: str = "spardl", *, step: int | None = None) -> None:
    """Writes this worker's state into a folder; all workers must call this.

    Args:
        handle: Handle from ``attach``.
        folder: Folder to write to; created if it does not exist.
        prefix: Prefix of the file name, which distinguishes the models of one checkpoint.
        step: Step of the checkpoint as the trainer counts it; ``None`` uses the handle's own count.

    Raises:
        OSError: If the file cannot be written; an older one then stays intact.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # In memory first: torch.save() writes in pieces, and the file must be replaced as a whole.
    buffer = io.BytesIO()
    torch.save({"step": handle.steps if step is None else step, "state": handle.state_dict()}, buffer)
    write_atomically(state_file(folder, prefix), buffer.getbuffer())


def load_state(
    handle: Hook, folder: Path, prefix: str = "spardl", *, step: int | None = None, fresh: bool = False
) -> None:
    """Restores the state that ``save_state`` wrote on the same rank and world size; all workers must call this.

    Args:
        handle: Handle from ``attach``.
        folder: Folder passed to ``save_state``.
        prefix: Prefix passed to ``save_state``.
        step: Step of the checkpoint as the trainer counts it, if known.
        fresh: Whether residuals start at zero if no worker has a state; otherwise this is an error.

    Raises:
        CheckpointError: On all workers, if one of them has no state for this world size or cannot read it, or if the
            states were not all saved at the step of the checkpoint.
    """
    values, read = _read(state_file(folder, prefix), folder, prefix, fresh)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, tuple(read))
    _check([_Read(*each) for each in found], folder, step)
    if values is not None:
        handle.load_state_dict(values["state"])


def _read(path: Path, folder: Path, prefix: str, fresh: bool) -> tuple[dict[str, Any] | None, _Read]:
    # Errors are returned: if one worker raised here, the others would wait for it in all_gather_object().
    if not path.exists():
        missing = (
            f"{folder} has {_others(folder, prefix)}, but no {path.name}; resume with the number of workers that saved "
            "it, or pass fresh=True to start with zero residuals"
        )
        return None, _Read(None, None if fresh else missing)
    try:
        with open_regular(path) as file:  # rejects pipes and devices, which would block
            values = torch.load(file, map_location="cpu", weights_only=True)
        return values, _Read(values["step"], None)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return None, _Read(None, f"{path} cannot be read ({reason}); resume from an older checkpoint")


def _check(found: Sequence[_Read], folder: Path, step: int | None) -> None:
    """Checks the results of all workers, so that all raise an error if one does.

    Raises:
        CheckpointError: If a worker could not read its state, or steps differ.
    """
    # A worker reports its own error first.
    for each in (found[dist.get_rank()], *found):
        if each.fault is not None:
            raise CheckpointError(each.fault)
    steps = {each.step for each in found}
    wanted = steps if step is None or steps == {None} else {step}
    if len(steps) > 1 or steps != wanted:
        said = ", ".join(sorted(str(each) for each in steps))
        expected = "a single step" if step is None else f"step {step} as the checkpoint"
        raise CheckpointError(
            f"the states in {folder} were saved at steps {said}, expected {expected}; resume from an older checkpoint"
        )


def _others(folder: Path, prefix: str) -> str:
    """Describes the states of other world sizes in a folder."""
    sizes = sorted({path.stem.rpartition("-")[2] for path in folder.glob(f"{prefix}-*-of-*.pt")})
    return f"states of {' and '.join(sizes)} workers" if sizes else "no workers' states"
