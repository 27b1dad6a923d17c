"""Sets up and removes a real Slurm on this machine, with several virtual nodes.

python scripts/slurm_lab.py up --nodes 4
eval "$(python scripts/slurm_lab.py env)"
sinfo; srun --ntasks=4 hostname
python scripts/slurm_lab.py down

It needs root and the Debian packages slurm-wlm and munge. All files are in one private folder (--folder):
configuration, key, sockets, state and logs. It uses free ports, and changes neither /etc/slurm nor a running Slurm.
Each virtual node is a separate slurmd; its processors exist only in the configuration.

There is no accounting: sacct fails, as on many small clusters. KillWait is short, and a requeued job starts again
within seconds (cred_expire).
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path

from scripts.labs.first_process import LabError, status

PROGRAMS = ("munged", "slurmctld", "slurmd", "sinfo", "squeue", "scancel", "sbatch", "srun", "scontrol")
MARK = "SPARDL_SLURM_LAB"  # environment variable of daemons, inherited by their children; not set for users
BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130
# Timeouts in seconds: answer of a daemon, end of jobs.
ANSWER, END = 30.0, 10.0
MOST_NODES, LONGEST = 64, 107  # nodes; characters of a socket path, a limit of the kernel

CONFIGURATION = """\
# Written by scripts/slurm_lab.py
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={munge},cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.txt
SlurmdLogFile={folder}/log/slurmd-%n.txt
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
JobRequeue=1
KillWait=3
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
{nodes}
PartitionName=lab Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


READY = """\
ready after {seconds:.0f} s: {nodes} idle nodes of 4 virtual CPUs, partition lab
use it in this shell:   eval "$(python scripts/slurm_lab.py env{folder})"
remove it:              python scripts/slurm_lab.py down{folder}"""


FOLDER = Path(tempfile.gettempdir()) / "spardl-slurm"


@dataclass(frozen=True)
class Lab:
    """A Slurm installation in one folder, an absolute path."""

    folder: Path

    @property
    def configuration(self) -> Path:
        """Configuration file, the value of SLURM_CONF."""
        return self.folder / "slurm.conf"

    @property
    def socket(self) -> Path:
        """Socket of MUNGE."""
        return self.folder / "munge.socket"

    def environment(self, **more: str) -> dict[str, str]:
        """Environment in which commands and jobs find the lab."""
        return {**os.environ, "SLURM_CONF": str(self.configuration), **more}

    def ask(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a command of Slurm.

        Raises:
            LabError: If it does not answer in time.
        """
        try:
            return subprocess.run(
                command,
                env=self.environment(),
                capture_output=True,
                text=True,
                timeout=ANSWER,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise LabError(f"{command[0]} did not answer within {ANSWER:g} s; see {self.folder}/log") from None

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """Starts a daemon that outlives this process."""
        with (self.folder / "log" / f"{Path(command[0]).name}-start.txt").open("ab") as log:
            return subprocess.Popen(
                command,
                env=self.environment(**{MARK: str(self.folder)}),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def processes(self) -> list[int]:
        """Process ids of the daemons and of their children with the same environment."""
        mark, found = f"{MARK}={self.folder}".encode(), []
        for pid in _processes():
            with suppress(OSError):  # the process has ended, or belongs to another user
                if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(pid)
        return found


def up(lab: Lab, nodes: int) -> None:
    """Starts all daemons of a new lab; after an error, no files or processes remain.

    Raises:
        LabError: If the lab cannot be set up.
    """
    if not 1 <= nodes <= MOST_NODES:
        raise LabError(f"--nodes must be from 1 to {MOST_NODES}, got {nodes}")
    if len(str(lab.socket)) > LONGEST:
        raise LabError(f"--folder {lab.folder} is too long for a socket path; choose a shorter one")
    if os.geteuid():
        raise LabError("the daemons of Slurm need root; run as root in a container or a virtual machine")
    if missing := [name for name in PROGRAMS if not shutil.which(name)]:
        raise LabError(f"missing programs: {', '.join(missing)}; install the packages slurm-wlm and munge")
    try:
        lab.folder.mkdir()
        lab.folder.chmod(0o755)  # all users must reach the socket of MUNGE
    except FileExistsError:
        raise LabError(f"{lab.folder} exists; remove that lab with 'down' or choose another --folder") from None
    except OSError as error:
        raise LabError(f"cannot create --folder {lab.folder}: {error.strerror}") from error
    began = time.monotonic()
    with ExitStack() as stack:
        stack.callback(_remove, lab)
        _set_up(lab, nodes)
        stack.pop_all()
    folder = "" if lab.folder == FOLDER else f" --folder {shlex.quote(str(lab.folder))}"
    print(READY.format(seconds=time.monotonic() - began, nodes=nodes, folder=folder), flush=True)


def _set_up(lab: Lab, nodes: int) -> None:
    for name in ("state", "spool", "log"):
        (lab.folder / name).mkdir()
    host = socket.gethostname().partition(".")[0]
    controller_port, *ports = _free_ports(1 + nodes)
    lines = "\n".join(
        f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=8000 State=UNKNOWN"
        for number, port in enumerate(ports)
    )
    text = CONFIGURATION.format(
        munge=lab.socket, host=host, controller_port=controller_port, folder=lab.folder, nodes=lines
    )
    lab.configuration.write_text(text)
    _start_munge(lab)
    daemons = [lab.start("slurmctld", "-D", "-i")]
    daemons += [lab.start("slurmd", "-D", "-N", f"n{number}") for number in range(nodes)]

    def ready() -> bool:
        idle = lab.ask("sinfo", "--noheader", "--Node", "--format=%N %t").stdout.split("\n")
        return sum(line.endswith(" idle") for line in idle) == nodes

    _await(ready, daemons, lab)


def _start_munge(lab: Lab) -> None:
    key = lab.folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    daemon = lab.start(
        "munged",
        "--foreground",
        "--force",  # accept private folders: $TMPDIR may not be accessible to all users
        f"--key-file={key}",
        f"--socket={lab.socket}",
        f"--pid-file={lab.folder}/munged.pid",
        f"--log-file={lab.folder}/log/munged.txt",
        f"--seed-file={lab.folder}/munge.seed",
    )

    _await(lab.socket.exists, [daemon], lab)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(closing(socket.socket())) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def _last_error(logs: Path) -> str:
    """Returns the last error in a folder of logs, otherwise the last line."""
    lines = [line for path in sorted(logs.iterdir()) for line in path.read_text(errors="replace").splitlines()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["its log is empty"])[-1].strip()


def _await(ready: Callable[[], bool], daemons: Sequence[subprocess.Popen[bytes]], lab: Lab) -> None:
    """Waits until daemons are ready.

    Raises:
        LabError: If one of them exits, or they are not ready in time.
    """
    until = time.monotonic() + ANSWER
    names = ", ".join(dict.fromkeys(str(daemon.args[0]) for daemon in daemons if isinstance(daemon.args, tuple)))
    while True:
        # First, as the question whether they are ready may wait long for the answer of a dead daemon.
        if any(daemon.poll() is not None for daemon in daemons):
            raise LabError(f"one of {names} exited: {_last_error(lab.folder / 'log')}; see {lab.folder}/log")
        if ready():
            return
        if time.monotonic() > until:
            raise LabError(f"{names} not ready within {ANSWER:g} s; see {lab.folder}/log")
        time.sleep(0.1)


def down(lab: Lab) -> None:
    """Cancels all jobs, ends all daemons and removes the folder, even if the setup was interrupted.

    Raises:
        LabError: If the folder is not that of a lab.
    """
    if lab.folder.exists() and not _is_ours(lab):
        raise LabError(f"--folder {lab.folder} was not created by this script and is kept; pass the folder of the lab")
    if not lab.folder.exists() and not lab.processes():
        raise LabError(f"no lab in {lab.folder}; pass its folder with --folder")
    _remove(lab)


def _is_ours(lab: Lab) -> bool:
    with suppress(OSError):
        return lab.configuration.read_text().startswith(CONFIGURATION.splitlines()[0])
    return not any(lab.folder.iterdir())


def _remove(lab: Lab) -> None:
    with suppress(LabError, OSError):
        _end_jobs(lab)
    # Processes of job steps have the environment of the user, without the mark, but descend from marked processes.
    for sent in (signal.SIGTERM, signal.SIGKILL):
        doomed = _with_descendants(lab.processes())
        for pid in doomed:
            with suppress(ProcessLookupError):
                os.kill(pid, sent)
        until = time.monotonic() + (2.0 if sent == signal.SIGTERM else ANSWER)
        while any(map(_lives, doomed)) and time.monotonic() < until:
            time.sleep(0.05)
    shutil.rmtree(lab.folder, ignore_errors=True)


def _end_jobs(lab: Lab) -> None:
    if not lab.processes():
        return
    if lab.ask("scancel", "--full", "--user=root").returncode:
        return
    until = time.monotonic() + END
    while lab.ask("squeue", "--noheader").stdout.strip() and time.monotonic() < until:
        time.sleep(0.2)


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _with_descendants(roots: list[int]) -> set[int]:
    parents = {pid: fields[1] for pid in _processes() if (fields := status(pid))}
    found = set(roots)
    while more := {pid for pid, parent in parents.items() if int(parent) in found} - found:
        found |= more
    return found


def _lives(pid: int) -> bool:
    return status(pid)[:1] not in ([], ["Z"])


def env(lab: Lab) -> None:
    """Prints the shell command that sets the environment variable of the lab.

    Raises:
        LabError: If the lab does not exist.
    """
    if not lab.configuration.exists():
        raise LabError(f"no lab in {lab.folder}; start one with: python scripts/slurm_lab.py up")
    print(f"export SLURM_CONF={shlex.quote(str(lab.configuration))}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    starting = commands.add_parser("up", help="start all daemons")
    starting.add_argument("--nodes", type=int, default=4, help="virtual nodes (default: 4)")
    starting.set_defaults(act=lambda lab, arguments: up(lab, arguments.nodes))
    commands.add_parser("down", help="stop all daemons and remove the folder").set_defaults(
        act=lambda lab, _: down(lab)
    )
    commands.add_parser("env", help="print the variables to export").set_defaults(act=lambda lab, _: env(lab))
    for command in commands.choices.values():
        command.add_argument("--folder", type=Path, default=FOLDER, help=f"default: {FOLDER}")
    return parser


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Runs the command line, and returns the exit code."""
    arguments = _parser().parse_args()
    lab = Lab(arguments.folder.resolve())
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        arguments.act(lab, arguments)
    except LabError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return BAD_INPUT
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return FAILED
    except KeyboardInterrupt:
        print("error: interrupted; the lab was removed", file=sys.stderr, flush=True)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
