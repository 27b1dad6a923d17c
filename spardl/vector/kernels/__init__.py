"""Compiled kernels for loops over all entries of a gradient, and over all entries sent.

Each kernel has a portable counterpart in torch with bit-identical results, for other devices and dtypes and for
installations without numba. The environment variable ``SPARDL_KERNELS=portable`` disables the compiled kernels.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from spardl.basics.errors import ConfigError, first_line
from spardl.basics.files import private_temporary_folder

__all__ = ["MOST_PER_PROGRAM", "compiled", "njit", "runs_triton"]

MOST_PER_PROGRAM = 1 << 16
"""Number of entries up to which one Triton program handles a range or message; torch uses all of the GPU for more.

An estimate: no GPU has been available to measure it.
"""

# Tests add an emulated device.
_TRITON_DEVICES = frozenset({"cuda"})


@lru_cache
def _is_there(library: str) -> bool:
    return find_spec(library) is not None


def _wanted() -> bool:
    chosen = os.environ.get("SPARDL_KERNELS", "")
    if chosen not in ("", "compiled", "portable"):
        raise ConfigError(f"SPARDL_KERNELS must be compiled or portable, got {chosen!r}; correct or unset it")
    return chosen != "portable"


def compiled(tensor: Tensor) -> bool:
    """Returns whether numba kernels are used for ``tensor``, of any shape."""
    return tensor.is_cpu and _wanted() and _is_there("numba")


def runs_triton(tensor: Tensor) -> bool:
    """Returns whether Triton kernels are used for ``tensor``, of any shape."""
    device = tensor.device
    return device.type in _TRITON_DEVICES and _wanted() and _is_there("triton") and _launches(device)


@lru_cache
def _launches(device: torch.device) -> bool:
    """Tries a kernel on a GPU: Triton needs a C compiler and a GPU that it supports."""
    if device.type != "cuda":
        return True
    try:
        from spardl.vector.kernels import gpu_select  # noqa: PLC0415 - triton is installed only with CUDA

        gpu_select.finite_flags(torch.zeros(1, device=device))
    except Exception as error:  # depends on Triton's version and the compiler
        warnings.warn(
            f"spardl: Triton cannot run kernels on {device} ({type(error).__name__}: {first_line(error)}), so torch is "
            "used, with more launches; install a C compiler, or set SPARDL_KERNELS=portable to hide this warning",
            stacklevel=2,
        )
        return False
    return True


def njit(**options: Any) -> Callable[[Any], Any]:
    """Returns a decorator like ``numba.njit`` that also works if numba finds no writable cache directory.

    Args:
        **options: Options of ``numba.njit``.

    Returns:
        The decorator.
    """
    import numba  # noqa: PLC0415 - takes seconds to import

    def decorate(function: Any) -> Any:
        try:
            return numba.njit(**options)(function)
        except RuntimeError as error:
            # Numba rejects cache=True if neither the installation nor the user's cache directory is writable. Cache in
            # a temporary directory then; if that is not writable either, each process compiles for itself.
            if not options.get("cache") or "no locator available" not in str(error):
                raise
        folder = _fallback_cache()
        before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, folder or ""
        try:
            return numba.njit(**{**options, "cache": bool(folder)})(function)
        finally:
            numba.config.CACHE_DIR = before

    return decorate


@lru_cache
def _fallback_cache() -> str | None:
    """Returns the fallback cache directory of the kernels, if any; warns once, in one process per machine."""
    private = private_temporary_folder()
    folder = str(private / "numba") if private else None
    where = f"the kernels are cached in {folder}" if folder else "every process compiles the kernels for itself"
    if os.environ.get("LOCAL_RANK", "0") == "0":
        logging.getLogger("spardl").warning(
            "neither the installation nor the home directory is writable, so %s; set NUMBA_CACHE_DIR to a writable "
            "directory to keep them",
            where,
        )
    return folder
