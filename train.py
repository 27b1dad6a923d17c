"""Trains a model with sparse gradients: composes the configuration with Hydra, and runs it once or as a sweep."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from typing import NoReturn

# Workers are forked from this process: no library may start threads or touch a GPU in it.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# A worker that loses a peer reports it on one line; torch would add its own stack trace.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
# The profiler would print its own log, and an error where there is no GPU.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
# Without this, Hydra prints a traceback and exits with code 1 instead of raising the error.
os.environ["HYDRA_FULL_ERROR"] = "1"

if __name__ == "__main__":
    # A signal during the imports would kill this process; main() handles it afterwards.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT})
    _limit, _refused = resource.getrlimit(resource.RLIMIT_AS)[0], ""
    if sys.stdin is None:
        os.open(os.devnull, os.O_RDONLY)
    # The next file that is opened would get the descriptor of a closed stream, and then the output.
    if sys.stdout is None or sys.stderr is None:
        _closed = "output" if sys.stdout is None else "error"
        _refused = f"standard {_closed} is closed; redirect it to a file or to /dev/null"
    elif _limit != resource.RLIM_INFINITY and "SPARDL_LIMIT_TRIED" not in os.environ:
        # The imports below can abort a process that is short of memory, so another process tries them first.
        _words, _tried = [sys.executable, __file__, "--version"], {**os.environ, "SPARDL_LIMIT_TRIED": "1"}
        if subprocess.run(_words, env=_tried, capture_output=True, check=False).returncode:
            _refused = f"ulimit -v allows {_limit >> 20} MiB, too few to load torch; use ulimit -v unlimited"
    if _refused:
        print(f"error: {_refused}", file=sys.stderr or sys.stdout, flush=True)
        os._exit(2)

import hydra
import torch
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from spardl.clusters.workers.processes import STOP_SIGNALS, StopRequestedError, exit_now, handling_signals
from trainer.build import CONFIGURATIONS
from trainer.command_line import BAD_INPUT, FAILED, INTERRUPTED, STOPPED, Asked, check_words, complain, describe, say
from trainer.job import attempt, sweeping
from trainer.memory import check_address_space
from trainer.runs import UnfinishedError
from trainer.sweep import print_table


def main() -> int:
    """Composes the configuration from the command line and trains, once or in a sweep.

    Returns:
        The exit code.
    """
    torch.set_num_threads(1)
    codes: list[int] = []

    @hydra.main(version_base="1.3", config_path=str(CONFIGURATIONS), config_name="train")
    def job(config: DictConfig) -> float | None:
        if stopped := [code for code in codes if code in (STOPPED, INTERRUPTED)]:
            raise UnfinishedError(stopped[0])  # a request to stop ends the whole sweep, not one run of it
        try:
            value = attempt(config)
        except UnfinishedError as unfinished:
            codes.append(unfinished.code)
            if sweeping():
                raise
            return None
        codes.append(0)
        return value

    try:
        with handling_signals(lambda: True, _stop_early, STOP_SIGNALS):
            if not _answer(check_words(sys.argv[1:])):
                check_address_space()
                job()
    except UnfinishedError as unfinished:
        if not codes:  # the run was in another process, started by a Hydra launcher
            codes.append(complain("a run of the sweep failed, see above", unfinished.code))
    except (HydraException, OmegaConfBaseException, OSError, ValueError, YAMLError) as error:
        return complain(describe(error), BAD_INPUT)
    except StopRequestedError:
        return say("stopped on request before training began", STOPPED)
    except KeyboardInterrupt as interrupt:
        return complain(str(interrupt) or "interrupted before training began", INTERRUPTED)
    finally:
        print_table()
    for code in (STOPPED, INTERRUPTED):
        if code in codes:
            return code
    if len(codes) > 1 and any(codes):
        return complain(f"{sum(map(bool, codes))} of the sweep's {len(codes)} runs failed, see above", FAILED)
    return max(codes, default=0)


def _answer(asked: Asked) -> bool:
    """Prints the help or a list of choices; returns whether the command line asked for it."""
    from trainer.listing import help_text, print_list  # noqa: PLC0415 - runs do not need it

    if asked.help:
        print(help_text(), end="")
    elif asked.choices:
        print_list(asked.choices, asked.folder)
    return asked.help or asked.choices is not None


def _stop_early() -> NoReturn:
    raise StopRequestedError


def _leave(code: int) -> NoReturn:
    # A Hydra launcher may keep a pool of processes for further runs; only an ordinary exit ends it.
    workers = multiprocessing.get_context("fork").Process
    if any(not isinstance(child, workers) for child in multiprocessing.active_children()):
        sys.exit(code)
    exit_now(code)


if __name__ == "__main__":
    _leave(main())
