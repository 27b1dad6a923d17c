"""What runs in each task of a job. It travels to the job by value, so it imports nothing of ours before it is there."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

__all__ = ["run"]


def run(root: str, words: Sequence[str]) -> None:
    """Is ``python train.py WORDS``, and ends the process with its exit code.

    Args:
        root: folder of train.py.
        words: of its command line.
    """
    # A signal that comes while torch is imported would kill the task; train.py lets it in when it can answer.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    sys.path.insert(0, root)
    import train  # noqa: PLC0415 - slow, and only in the job
    from spardl.clusters.workers.processes import leave  # noqa: PLC0415

    sys.argv = ["train.py", *words]
    leave(train.main())
