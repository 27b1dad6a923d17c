"""Checks an installation and a cluster within a minute: what is there, who reaches whom, how fast, and how right.

python scripts/doctor.py                                         # four workers on this machine
torchrun --nproc-per-node 4 scripts/doctor.py --out network.yaml # those that torchrun, or srun, starts
srun python scripts/doctor.py --interface eth0

Each check prints one line: ok, warning or FAILED, with what, where and the fix. The exit code is 0, or 1 if any failed;
2 for bad input. With --out, the network between the workers as it was measured (alpha, Gbit/s) is written to a file,
which cluster.network, cluster.throttle and scripts/timeline.py --network take in place of a preset's name.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

# The workers' own lines say what matters.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

import torch
import torch.distributed as dist
from doctoring import fit, installation, laws, meeting, pairs
from doctoring.findings import Findings

from spardl.basics.errors import ConfigError, PeerError, SpardlError, WorkerError
from spardl.basics.messages import first_line
from spardl.clusters import ProcessGroupCluster
from spardl.clusters.precompile import precompile
from spardl.clusters.workers.devices import pick_device
from spardl.clusters.workers.membership import Membership, find_membership
from spardl.clusters.workers.processes import leave, run_processes

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Refuses.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{message}; {self.prog} --help lists what there is")


class Examination:
    """What one worker does.

    Args:
        arguments: of the command line.
        member: this worker.
        findings: where the first worker says what was found.
    """

    def __init__(self, arguments: argparse.Namespace, member: Membership, findings: Findings) -> None:
        self._arguments, self._member, self._findings = arguments, member, findings
        self._device = pick_device(arguments.device, member.local_rank, member.local_size)
        self._backend = "nccl" if self._device.type == "cuda" else "gloo"
        self._doing = "installation"

    def perform(self, store: Any) -> bool:
        """Finds out who is there, and then what the cluster does; all workers get the same answer.

        Returns:
            Whether all is well.

        Raises:
            PeerError: if the first worker is lost, which would say what is wrong.
        """
        place = meeting.Meeting(self._member, store, self._arguments.timeout)
        installation.check_versions(self._findings)
        installation.check_extras(self._findings)
        with closing(meeting.listen(self._backend)) as listener:
            present = meeting.roll_call(place, self._backend, listener, self._findings)
            if present and meeting.reach_all(place, present, self._findings):
                self._attempt(place, present)
        return meeting.agree(place, self._findings)

    def _attempt(self, place: meeting.Meeting, present: Sequence[meeting.Present]) -> None:
        """Goes on as long as nobody is lost."""
        meeting.check_present(present, self._findings)
        try:
            self._examine(place.store, [one.host for one in present])
        except Exception as error:
            # Whatever it is, the others must hear of it.
            own = not isinstance(error, PeerError)
            reason = f"worker {self._member.rank}: {type(error).__name__}: {first_line(error)}" if own else str(error)
            meeting.name_lost(place, present, self._doing, reason, own, self._findings)

    def _examine(self, store: Any, hosts: Sequence[str]) -> None:
        """Measures and verifies over a process group."""
        cluster, findings = self._open(store), self._findings
        self._doing = "links"
        speed = pairs.probe(cluster)
        pairs.check_links(pairs.measure(cluster, hosts, speed), findings)
        self._doing = "network"
        network = fit.fit(cluster, speed)
        fit.write_preset(network, hosts, self._backend, self._arguments.out if cluster.leads else None, findings)
        self._doing = "all-reduce"
        fit.check_all_reduce(cluster, network, findings)
        self._doing = "synchronizations"
        laws.check_spardl(cluster, findings)
        laws.check_methods(cluster, findings)
        laws.check_pace(cluster, network, findings)
        cluster.close()

    def _open(self, store: Any) -> ProcessGroupCluster:
        self._doing = f"backend {self._backend}"
        patience = self._arguments.timeout
        group: Any = dist.PrefixStore("group", store)  # type: ignore[attr-defined]
        rank, size = self._member.rank, self._member.size
        try:
            dist.init_process_group(
                self._backend, store=group, rank=rank, world_size=size, timeout=timedelta(seconds=patience)
            )
        except RuntimeError as error:
            raise PeerError(f"worker {rank} could not connect: {first_line(error)}") from error
        self._findings.ok(f"backend: {self._backend} on {self._device.type}, {size} workers")
        return ProcessGroupCluster(device=self._device, timeout=patience)


def start(arguments: argparse.Namespace) -> int:
    """Starts workers on this machine.

    Returns:
        The exit code.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        told = folder / "told"

        def target(rank: int, heartbeat: object) -> None:
            os.environ.setdefault(installation.VARIABLES["gloo"], "lo")
            member = Membership(rank, arguments.workers, rank, arguments.workers, "127.0.0.1", 0)
            findings = Findings(rank == 0)
            store = dist.FileStore(str(folder / "store"), arguments.workers)  # type: ignore[attr-defined]
            try:
                healthy = Examination(arguments, member, findings).perform(store)
            finally:
                if findings.failures and findings.speaks:
                    told.touch()
            if not healthy:
                raise WorkerError("not all is well")

        try:
            run_processes(arguments.workers, target, folder)
        except ConfigError:
            raise
        except SpardlError as error:
            if not told.exists():
                Findings(True).fail(f"workers: {str(error).replace(' at step 0', '')}")
            return FAILED
    return 0


def join(arguments: argparse.Namespace, member: Membership) -> int:
    """Is one of the workers that torchrun or srun started.

    Returns:
        The exit code.
    """
    findings = Findings(member.rank == 0)
    try:
        store = meeting.join_store(member, arguments.timeout)
        healthy = Examination(arguments, member, findings).perform(store)
    except PeerError as error:
        Findings(True).fail(f"workers: {error}")
        return FAILED
    return 0 if healthy else FAILED


def parse(words: Sequence[str], member: Membership | None) -> argparse.Namespace:
    """Reads the command line.

    Args:
        words: of it.
        member: this process, if torchrun or srun started it.

    Raises:
        ConfigError: if it makes no sense.
    """
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, help="how many to start on this machine (4), or as many as were started")
    parser.add_argument("--out", type=Path, help="a file for the network as it was measured")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds that bound every wait for a worker (30)")
    parser.add_argument("--interface", help="network interface for gloo and NCCL, as cluster.interface")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="as cluster.device (auto)")
    arguments = parser.parse_args(words)
    if member and arguments.workers not in (None, member.size):
        raise ConfigError(f"--workers {arguments.workers}, but {member.size} workers were started; leave it away")
    arguments.workers = member.size if member else 4 if arguments.workers is None else arguments.workers
    if arguments.workers < 2:
        raise ConfigError(f"--workers must be at least 2, got {arguments.workers}: one worker has no peers to check")
    if not 1 <= arguments.timeout <= 3600:
        raise ConfigError(f"--timeout must be from 1 to 3600 seconds, got {arguments.timeout:g}")
    if arguments.out and (arguments.out.is_dir() or not arguments.out.parent.is_dir()):
        raise ConfigError(f"--out {arguments.out} must be a file in a folder that exists")
    if arguments.interface and arguments.interface not in installation.interfaces():
        there = ", ".join(installation.interfaces())
        raise ConfigError(f"--interface {arguments.interface} is not on {socket.gethostname()}; use one of {there}")
    return arguments


def main(words: Sequence[str]) -> int:
    """Examines.

    Returns:
        The exit code.
    """
    torch.set_num_threads(1)
    try:
        member = find_membership(os.environ)
        arguments = parse(words, member)
        for variable in installation.VARIABLES.values() if arguments.interface else ():
            os.environ[variable] = arguments.interface
        # Compiled once, before workers are forked and before they wait for one another.
        precompile(torch.float32)
        return join(arguments, member) if member else start(arguments)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED


if __name__ == "__main__":
    leave(main(sys.argv[1:]))  # torch may abort in the shutdown of the interpreter, when a peer was lost
