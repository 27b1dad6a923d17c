"""What every worker carries from step to step, in files beside another library's checkpoint."""

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


# The model as other people's trainers have wrapped it, and the method for it.


def distributed(model: nn.Module, launcher: str) -> DistributedDataParallel:
    """The model, if it is distributed by DDP.

    Raises:
        ConfigError: if it is not.
    """
    model = getattr(model, "_orig_mod", model)  # where torch.compile put it
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(
            f"the model is a {type(model).__name__}, not distributed by DDP: start several workers ({launcher}), "
            "without another way to distribute the model"
        )
    return model


def method_of(method: str | Method, options: Mapping[str, Any]) -> Method:
    """The method that ``attach`` would make.

    Args:
        method: a name, or a method.
        options: of ``attach`` and of the method.

    Raises:
        ConfigError: if the method or an option is unknown.
    """
    own = signature(attach).parameters
    return make_method(method, **{key: each for key, each in options.items() if key not in own})


class _Read(NamedTuple):
    """What one worker found: a step, or what is wrong; neither if there is no file, and need not be one."""

    step: int | None
    fault: str | None


def state_file(folder: Path, prefix: str = "spardl") -> Path:
    """Where this worker's state is, or would be, in a folder.

    Args:
        folder: of a checkpoint.
        prefix: of the file's name.
    """
    return folder / f"{prefix}-{dist.get_rank()}-of-{dist.get_world_size()}.pt"


def save_state(handle: Hook, folder: Path, prefix: str = "spardl", *, step: int | None = None) -> None:
    """Writes this worker's state into a folder; all workers call it.

    Args:
        handle: from ``attach``.
        folder: is made if it is not there.
        prefix: of the file's name, where one checkpoint has the states of several models.
        step: of the checkpoint, by the trainer's count; by the handle's own if ``None``.

    Raises:
        OSError: if it cannot be written; an older state stays whole then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save({"step": handle.steps if step is None else step, "state": handle.state_dict()}, buffer)
    write_atomically(state_file(folder, prefix), buffer.getbuffer())


def load_state(
    handle: Hook, folder: Path, prefix: str = "spardl", *, step: int | None = None, fresh: bool = False
) -> None:
    """Continues from what ``save_state`` wrote, by the same rank of as many; all workers call it.

    Args:
        handle: from ``attach``.
        folder: as saved.
        prefix: as saved.
        step: of the checkpoint, by the trainer's count, if it tells.
        fresh: whether residuals begin at zero where no worker has a state, instead of an error.

    Raises:
        CheckpointError: on all workers, if one of them has no state among so many, or cannot read it, or states are not
            of one step, the checkpoint's.
    """
    values, read = _read(state_file(folder, prefix), folder, prefix, fresh)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, tuple(read))
    _check([_Read(*each) for each in found], folder, step)
    if values is not None:
        handle.load_state_dict(values["state"])


def _read(path: Path, folder: Path, prefix: str, fresh: bool) -> tuple[dict[str, Any] | None, _Read]:
    """A worker's file. What is wrong is not raised yet: the others would wait."""
    if not path.exists():
        missing = (
            f"{folder} has {_others(folder, prefix)}, and no {path.name}: go on with as many workers as saved it, or"
        )
        return None, _Read(None, None if fresh else f"{missing} let residuals begin at zero by fresh=True")
    try:
        with open_regular(path) as file:
            values = torch.load(file, map_location="cpu", weights_only=True)
        return values, _Read(values["step"], None)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return None, _Read(None, f"{path} cannot be read ({reason}); take an older checkpoint")


def _check(found: Sequence[_Read], folder: Path, step: int | None) -> None:
    """Accepts what all workers have found, or raises the same everywhere.

    Raises:
        CheckpointError: if something is wrong with one of them.
    """
    for each in (found[dist.get_rank()], *found):
        if each.fault is not None:
            raise CheckpointError(each.fault)
    steps = {each.step for each in found}
    wanted = steps if step is None or steps == {None} else {step}
    if len(steps) > 1 or steps != wanted:
        said = ", ".join(sorted(str(each) for each in steps))
        of_all = "all of one step" if step is None else f"of step {step}, as the checkpoint is"
        raise CheckpointError(f"states in {folder} are of steps {said}, not {of_all}; take an older checkpoint")


def _others(folder: Path, prefix: str) -> str:
    """What else is there, in words."""
    sizes = sorted({path.stem.rpartition("-")[2] for path in folder.glob(f"{prefix}-*-of-*.pt")})
    return f"states of {' and '.join(sizes)} workers" if sizes else "no states of residuals"
