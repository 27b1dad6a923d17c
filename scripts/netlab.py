"""Runs a command as P workers in separate network namespaces, with links of a chosen bandwidth.

python scripts/netlab.py run --workers 4 --gbit 1 -- python train.py compressor=spardl
python scripts/netlab.py run --workers 4 --gbit 1 --delay-ms 0.5 -- python train.py compressor=spardl
python scripts/netlab.py run --workers 2 --gbit inf --json traffic.json -- python program.py

The environment of each worker has RANK, WORLD_SIZE, MASTER_ADDR and so on, as torchrun would set them: any program
that initializes torch.distributed with env:// works. Worker 0 writes to this terminal; the lines of the others go to
standard error, prefixed with their rank. If a worker fails, all are terminated. At the end, the bytes that each
worker's interface sent and received are printed to standard error. The exit code is that of the first worker that
failed; 2 for bad input, 124 for a timeout, 130 and 143 for Ctrl-C and SIGTERM.

With a delay, a process of the lab (labs/delay_line.py) holds back IPv4 packets that arrive at a worker, so a round trip
takes twice the delay. If that process ends, the lab ends with its exit code and an error.

A lab has separate network, mount and process namespaces (and a user namespace without root): labs do not see each
other, and a lab ends with its first process, whatever ends that. The first process watches the process started here,
and terminates the workers within 10 s if it is gone, even after kill -9. Inside a lab, /run is empty and only the other
workers can be reached.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from scripts.labs import first_process
from scripts.labs.first_process import (
    BAD_INPUT,
    GRACE,
    INTERRUPTED,
    SET_UP,
    TERMINATED,
    TIMED_OUT,
    Lab,
    LabError,
    attempt,
    exit_code,
    tool,
)

FIRST_PROCESS = Path(first_process.__file__).resolve()
PACKAGES = {"unshare": "util-linux", "mount": "mount", "ip": "iproute2", "tc": "iproute2"}  # of the programs needed
PACKAGES_FOR_DELAY = {"iptables": "iptables"}
PRIVATE = ("--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
PRIVATE_USER = ("--user", "--map-root-user", *PRIVATE)


def demand(packages: Mapping[str, str]) -> None:
    """Checks that programs are installed, given the Debian package of each.

    Raises:
        LabError: If a program is missing.
    """
    missing = [name for name in packages if not tool(name)]
    if missing:
        wanted = " ".join(sorted({packages[name] for name in missing}))
        raise LabError(f"missing programs: {', '.join(missing)}; install {wanted}, as in apt-get install {wanted}")


def isolation(user_namespace: bool) -> list[str]:
    """Returns the command prefix that starts a process in new namespaces; root does not need a user namespace.

    Raises:
        LabError: If this machine does not allow new namespaces.
    """
    refusals = []
    for way in [PRIVATE_USER] if user_namespace or os.geteuid() else [PRIVATE, PRIVATE_USER]:
        done = attempt(["unshare", *way, "sh", "-c", "mount -t tmpfs netlab /run && mkdir /run/netns"])
        if not done.returncode:
            return [str(tool("unshare")), *way]
        refusals.append("; ".join(done.stderr.splitlines()))
    raise LabError(
        f"namespaces are not allowed here ({refusals[0]}): run as root (in a container, with --privileged), or allow "
        "user namespaces (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Checks the input and the machine, then starts the lab and waits until it ends.

    Returns:
        The exit code.

    Raises:
        LabError: If an option is invalid, or this machine cannot run a lab.
    """
    lab = Lab(arguments.workers, arguments.gbit, arguments.timeout, arguments.delay_ms)
    if not arguments.command:
        raise LabError("no command given; put it after --, as in run --workers 4 --gbit 1 -- python train.py")
    if not shutil.which(arguments.command[0]):
        raise LabError(f"program {arguments.command[0]} not found; give its path or set PATH")
    if arguments.json and not arguments.json.parent.is_dir():
        raise LabError(f"--json {arguments.json}: create the folder {arguments.json.parent} first")
    demand({**PACKAGES, **PACKAGES_FOR_DELAY} if lab.delay_ms else PACKAGES)
    way = isolation(arguments.user_namespace)
    for doubt in lab.doubts():
        print(f"warning: {doubt}", file=sys.stderr, flush=True)
    what = [json.dumps(asdict(lab)), str(arguments.json or ""), *arguments.command]
    return attend([*way, sys.executable, str(FIRST_PROCESS), *what], arguments.timeout)


def attend(command: Sequence[str], timeout: float) -> int:
    """Starts a lab, waits for it, and returns the exit code; the lab never outlives this call."""
    # The kernel closes the pipe when this process ends, which ends the lab. In a new session the lab does not receive
    # the terminal's Ctrl-C, so it can terminate its workers in order.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert process.stdin
    try:
        return exit_code(process.wait(timeout=timeout + SET_UP + 4 * GRACE))
    except subprocess.TimeoutExpired:
        print("error: the lab did not end in time; killing it", file=sys.stderr, flush=True)
        return TIMED_OUT
    finally:
        process.stdin.close()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=3 * GRACE)
        finally:
            process.kill()


class Parser(argparse.ArgumentParser):
    """Reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        """Raises a ``LabError``."""
        raise LabError(f"{message}; see {self.prog} --help")


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Reads the command line; what follows ``--`` is the command of the workers.

    Raises:
        LabError: If it makes no sense.
    """
    split = words.index("--") if "--" in words else len(words)
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(required=True, metavar="run")
    running = actions.add_parser(
        "run", help="run a command as each of the workers", usage="%(prog)s OPTIONS -- COMMAND"
    )
    running.add_argument("--workers", type=int, required=True, help="number of workers, 1 to 250")
    running.add_argument("--gbit", type=float, required=True, help="Gbit/s of each link and direction; inf: no limit")
    running.add_argument("--delay-ms", type=float, default=0.0, help="one-way delay of messages in milliseconds (0)")
    running.add_argument("--timeout", type=float, default=3600.0, help="time limit in seconds (3600)")
    running.add_argument("--json", type=Path, help="file for bytes, seconds and exit code")
    running.add_argument(
        "--user-namespace", action="store_true", help="use a user namespace as root also; other users always do"
    )
    arguments = parser.parse_args(words[:split])
    arguments.command = list(words[split + 1 :])
    return arguments


def main(words: Sequence[str]) -> int:
    """Runs a lab, and returns the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        return run(parse(words))
    except (LabError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
