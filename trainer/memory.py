"""Computes a lower bound of the memory that a run needs, before it starts."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from spardl.basics.errors import ConfigError
from spardl.method.method import Method
from spardl.vector.layout import Layout
from trainer.optimizers import OptimizerFactory, takes_model

__all__ = ["Need", "available_bytes", "check_address_space", "memory_warning"]

# Bytes of address space that a worker reserves for thread stacks, malloc arenas and gloo; 660 MiB were measured.
_RESERVED = 700 << 20
# Length of the vectors that measure the state of an optimizer and of a method per parameter.
_PROBE = 64


@dataclass(frozen=True)
class Need:
    """Memory that one process needs from step to step, in bytes, excluding activations, data and libraries.

    Attributes:
        weights: Bytes of weights and running statistics.
        gradients: Bytes of the gradients of all parameters.
        optimizer: Bytes of the optimizer's state.
        residuals: Bytes of the method's state, for all workers of the process.
    """

    weights: int
    gradients: int
    optimizer: int
    residuals: int

    @property
    def whole(self) -> int:
        """Total number of bytes."""
        return self.weights + self.gradients + self.optimizer + self.residuals

    @staticmethod
    def of(
        model: nn.Module,
        dtype: torch.dtype,
        optimizer: OptimizerFactory,
        method: Method,
        workers: int,
        *,
        alone: bool = False,
    ) -> Need:
        """Computes the memory that a process needs.

        Args:
            model: Model to train; may be on the device ``meta``.
            dtype: Dtype of its floating-point parameters and buffers during training.
            optimizer: Function that builds the optimizer from parameters.
            method: Method that averages the gradients.
            workers: Number of workers that share the process.
            alone: Whether each worker has its own weights and optimizer, in addition to the common weights.
        """
        length = sum(parameter.numel() for parameter in model.parameters())
        buffers = sum(buffer.numel() for buffer in model.buffers())
        # State is proportional to the number of parameters, so a short probe suffices.
        kept = method.init_state(Layout.flat(_PROBE), dtype)
        moments = kept.moments.velocity.nbytes + kept.moments.variance.nbytes
        size = dtype.itemsize
        sets, optimizers = (2 + workers, workers) if alone else (1, 1)
        return Need(
            (sets * length + workers * buffers) * size,
            length * size,
            0 if method.momentum.moved else optimizers * round(length * size * _moments(optimizer, dtype)),
            round(length * (kept.memory.nbytes + moments) / _PROBE * workers),
        )


def _moments(optimizer: OptimizerFactory, dtype: torch.dtype) -> float:
    """Returns the number of state values that an optimizer keeps per parameter, the lowest if parameters differ."""
    # Muon keeps fewer values for matrices than AdamW for other parameters.
    shape = (1, _PROBE) if takes_model(optimizer) else (_PROBE,)
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
    # Optimizers create their state in the first step.
    parameter.grad = torch.ones_like(parameter)
    made = optimizer([parameter])
    made.step()
    # Step counters, of one entry, do not grow with the parameters.
    tensors = [value for value in made.state[parameter].values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() for tensor in tensors if tensor.numel() > 1) / _PROBE


def available_bytes(table: Path = Path("/proc/meminfo")) -> int | None:
    """Returns the memory available to new programs without swapping, in bytes; ``None`` if unknown."""
    try:
        lines = table.read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(found[0]) if found else None


def check_address_space(need: Callable[[], Need] | None = None) -> None:
    """Checks that the limit on the address space (``ulimit -v``) suffices for a worker on the CPU.

    Args:
        need: Function that computes the memory that one process needs, called only if there is a limit; ``None`` if
            this is not known yet.

    Raises:
        ConfigError: If the limit is too low.
    """
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return
    # The limit applies to the address space, of which libraries have already taken a part.
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    least = used + _RESERVED + (need().whole if need else 0)
    if limit < least:
        raise ConfigError(
            f"ulimit -v allows {limit >> 20} MiB, and a worker needs at least {least >> 20} MiB of address space; use "
            "ulimit -v unlimited"
        )


def memory_warning(need: Need, processes: int, available: int | None) -> str | None:
    """Returns a warning if the processes of this machine need more memory than is available, otherwise ``None``.

    Args:
        need: Memory that each process needs.
        processes: Number of processes on this machine.
        available: Number of available bytes; ``None`` if unknown.
    """
    if available is None or need.whole * processes <= available:
        return None
    parts = {"weights": need.weights, "gradients": need.gradients, "residuals": need.residuals}
    named = ", ".join(f"{name} {_gigabytes(part)}" for name, part in {**parts, "optimizer": need.optimizer}.items())
    return (
        f"not enough memory: {processes} process(es) on this machine need at least "
        f"{_gigabytes(need.whole * processes)} GB, each {_gigabytes(need.whole)} ({named}; excluding activations), "
        f"and {_gigabytes(available)} GB are available; use fewer workers, or a smaller model"
    )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g}"
