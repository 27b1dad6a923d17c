"""What a machine lends to its workers: GPUs and threads."""

from __future__ import annotations

from typing import Any

import torch

from spardl.checks import is_a
from spardl.errors import ConfigError

__all__ = ["at_least_one", "check_device", "check_threads", "count_gpus", "pick_device"]

# Of a worker: torch starts as many as it is told to.
_MOST_THREADS = 1024


def at_least_one(name: str, value: Any) -> None:
    """Accepts a number of workers and the like.

    Raises:
        ConfigError: if it is not a whole number, at least 1.
    """
    if not is_a(int, value) or value < 1:
        raise ConfigError(f"{name} must be a whole number, at least 1, got {value!r}")


def check_threads(threads: Any) -> None:
    """Accepts a number of threads of a worker.

    Raises:
        ConfigError: if it is not a whole number, or out of range.
    """
    if not is_a(int, threads) or not 1 <= threads <= _MOST_THREADS:
        wanted = f"a whole number, at least 1 and at most {_MOST_THREADS}"
        raise ConfigError(f"cluster.threads must be {wanted}, got {threads!r}")


def check_device(device: str) -> None:
    """Accepts the name of a kind of device.

    Raises:
        ConfigError: if there is no such one.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"cluster.device must be auto, cpu or cuda, got {device!r}")


def pick_device(wanted: str, local_rank: int, local_size: int) -> torch.device:
    """The device of a worker; to be asked only in its own process, since CUDA does not survive a fork.

    Args:
        wanted: cpu, cuda, or auto.
        local_rank: which worker of this machine.
        local_size: of how many that share its GPUs.

    Raises:
        ConfigError: if there are not as many GPUs as wanted.
    """
    count = count_gpus(wanted, local_size)
    if count < local_size:
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % count)
    torch.cuda.set_device(device)
    return device


def count_gpus(wanted: str, sharing: int) -> int:
    """GPUs that workers may use, without touching one: this process may be forked afterwards.

    Args:
        wanted: cpu, cuda, or auto.
        sharing: how many workers of this machine want one.

    Raises:
        ConfigError: if there are not as many as wanted.
    """
    if wanted == "cpu":
        return 0
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cuda" and count < sharing:
        raise ConfigError(
            f"cluster.device=cuda needs {sharing} GPU(s) on this machine, one for each process, and torch finds "
            f"{count}; use fewer workers, or cluster.device=cpu"
        )
    return count
