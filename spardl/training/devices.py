"""What a machine lends to its workers: GPUs and threads."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from typing import Any

from spardl.basics.checks import is_a
from spardl.basics.errors import ConfigError
from spardl.basics.messages import first_line
from spardl.clusters.workers.devices import count_gpus

__all__ = ["at_least_one", "check_device", "check_threads", "count_gpus_aside"]

# Of a worker: torch starts as many as it is told to.
_MOST_THREADS = 1024
# Seconds that CUDA may take to count GPUs.
_PATIENCE = 60.0


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


def count_gpus_aside(wanted: str, sharing: int) -> int:
    """As ``count_gpus``, in a process of its own: this one may be forked afterwards, which CUDA would not survive.

    Raises:
        ConfigError: likewise, or if there is no answer.
    """
    if wanted == "cpu":
        return 0
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_count, args=(theirs, wanted, sharing), daemon=True)
    process.start()
    theirs.close()
    try:
        answer: int | str = ours.recv() if ours.poll(_PATIENCE) else _no_count("no answer")
    except EOFError:
        answer = _no_count("the process that looked died")
    process.kill()
    process.join()
    if isinstance(answer, str):
        raise ConfigError(answer)
    return answer


def _count(told: Connection, wanted: str, sharing: int) -> None:
    try:
        told.send(count_gpus(wanted, sharing))
    except ConfigError as error:
        told.send(str(error))
    except Exception as error:
        told.send(_no_count(first_line(error)))
    os._exit(0)


def _no_count(reason: str) -> str:
    return f"torch cannot count GPUs ({reason}); use cluster.device=cpu"
