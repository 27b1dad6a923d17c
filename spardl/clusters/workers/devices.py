"""The GPUs that a machine lends to its workers."""

from __future__ import annotations

import torch

from spardl.basics.errors import ConfigError

__all__ = ["count_gpus", "pick_device"]


def pick_device(wanted: str, local_rank: int, local_size: int, option: str = "cluster.device") -> torch.device:
    """The device of a worker; to be asked only in its own process, since CUDA does not survive a fork.

    Args:
        wanted: cpu, cuda, or auto.
        local_rank: which worker of this machine.
        local_size: of how many that share its GPUs.
        option: how its users say what is wanted.

    Raises:
        ConfigError: if there are not as many GPUs as wanted.
    """
    count = count_gpus(wanted, local_size, option)
    if count < local_size:
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % count)
    torch.cuda.set_device(device)
    return device


def count_gpus(wanted: str, sharing: int, option: str = "cluster.device") -> int:
    """GPUs that workers may use.

    Args:
        wanted: cpu, cuda, or auto.
        sharing: how many workers of this machine want one.
        option: how their users say what is wanted.

    Raises:
        ConfigError: if there are not as many as wanted.
    """
    if wanted == "cpu":
        return 0
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cuda" and count < sharing:
        raise ConfigError(
            f"{option}=cuda needs {sharing} GPU(s) on this machine, one for each process, and torch finds "
            f"{count}; use fewer workers, or {option}=cpu"
        )
    return count
