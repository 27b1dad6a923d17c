"""Entry point of each task of a job."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

__all__ = ["run"]


def run(words: Sequence[str]) -> None:
    """Runs ``python train.py WORDS`` and ends the process with its exit code.

    Args:
        words: Arguments of train.py.
    """
    # A signal during the import of torch would kill the task. train.py unblocks signals when it can handle them.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    import train  # noqa: PLC0415 - slow, and only in the job
    from spardl.clusters.workers.processes import exit_now  # noqa: PLC0415

    sys.argv = ["train.py", *words]
    exit_now(train.main())
