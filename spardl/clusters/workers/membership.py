"""This process as one of several that torchrun or srun started."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import re
import socket
import struct
import subprocess
from collections.abc import Mapping
from typing import NamedTuple

import torch

from spardl.basics.errors import ConfigError

__all__ = [
    "Membership",
    "address_of",
    "count_gpus",
    "find_membership",
    "find_secret",
    "leads",
    "listen",
    "listen_as",
    "pick_device",
    "what_a_restart_needs",
]


# Sockets that listen on one address of this machine instead of on all.


# The kernel's request for an interface's IPv4 address, and where the answer has it.
_SIOCGIFADDR, _ADDRESS = 0x8915, slice(20, 24)
_QUEUE = 4096


def address_of(interface: str) -> str | None:
    """The IPv4 address of a network interface; ``None`` if it has none, or is not there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[_ADDRESS])


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens on an address of this machine.

    Args:
        address: IPv4 or IPv6.
        port: 0 for any free one.

    Raises:
        OSError: if the port is taken, or the address is not this machine's.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(_QUEUE)
    except OSError:
        listener.close()
        raise
    return listener


def listen_as(host: str, port: int, *, alone: bool) -> socket.socket | None:
    """A socket that listens where others will look for a host name, or address, of this machine.

    Args:
        host: what the others connect to.
        port: 0 for any free one.
        alone: whether all of them are on this machine. If not, a name that means the loopback here means something else
            to them.

    Returns:
        The socket; ``None`` if no address of this machine is known to be the one they will try, as behind a
        translation of addresses.

    Raises:
        OSError: if the port is taken, or the name means nothing.
    """
    for address in dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)):
        if not (alone or address == host) and ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            continue
        try:
            return listen(address, port)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    return None


# The GPUs that a machine lends to its workers.


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


class Membership(NamedTuple):
    """Which of how many this process is, and where they meet.

    Attributes:
        rank: which one.
        size: of how many.
        local_rank: which one on this machine.
        local_size: of how many that share its GPUs.
        host: where rank 0 is.
        port: on which it listens.
        served: whether torchrun's agent, and not rank 0, holds the store there.
        alone: whether all are known to be on this machine.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    port: int
    served: bool = False
    alone: bool = False


def find_membership(environment: Mapping[str, str]) -> Membership | None:
    """Reads what torchrun or srun left in the environment; ``None`` if neither started this process.

    Raises:
        ConfigError: if a rank, a number of workers or a port is not valid.
    """
    if "TORCHELASTIC_RUN_ID" in environment or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(environment):
        size = _number(environment, "WORLD_SIZE", least=1)
        return Membership(
            _number(environment, "RANK", most=size - 1),
            size,
            _number(environment, "LOCAL_RANK", "0"),
            _number(environment, "LOCAL_WORLD_SIZE", "1", least=1),
            environment["MASTER_ADDR"],
            _port(environment),
            environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            environment.get("LOCAL_WORLD_SIZE") == environment["WORLD_SIZE"],
        )
    # A batch script also has SLURM_PROCID, but only srun starts all the tasks, each in a step.
    if "SLURM_STEP_NODELIST" in environment and int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return Membership(
            int(environment["SLURM_PROCID"]),
            int(environment["SLURM_STEP_NUM_TASKS"]),
            int(environment["SLURM_LOCALID"]),
            1,  # srun hands out the GPUs as it was asked to
            environment.get("MASTER_ADDR") or _first_host(environment["SLURM_STEP_NODELIST"]),
            _port(environment) if environment.get("MASTER_PORT") else 15000 + int(environment["SLURM_JOB_ID"]) % 20000,
            alone=environment.get("SLURM_STEP_NUM_NODES") == "1",
        )
    return None


def _port(environment: Mapping[str, str]) -> int:
    return _number(environment, "MASTER_PORT", least=1, most=2**16 - 1)


def _number(
    environment: Mapping[str, str], name: str, default: str = "", *, least: int = 0, most: int | None = None
) -> int:
    """A whole number from the environment.

    Raises:
        ConfigError: if the variable is missing, not a whole number, or out of range.
    """
    text = environment.get(name, default)
    if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
        bounds = f"from {least} to {most}" if most is not None else f"of at least {least}"
        raise ConfigError(f"{name}={text} in the environment is not valid; set it to a whole number {bounds}")
    return int(text)


def leads(environment: Mapping[str, str]) -> bool:
    """Whether this process speaks for all: it was started alone, or as the first of several."""
    return environment.get("RANK" if "RANK" in environment else "SLURM_PROCID", "0") == "0"


def find_secret(environment: Mapping[str, str]) -> str:
    """What workers that were started elsewhere know of their run, and strangers do not.

    That is ``SPARDL_SECRET`` where it is set, as ``slurm/step.sh`` does. What Slurm or torchrun call the run is no
    secret, but keeps two runs apart.
    """
    secret = environment.get("SPARDL_SECRET")
    step = "{SLURM_JOB_ID}.{SLURM_STEP_ID}" if {"SLURM_JOB_ID", "SLURM_STEP_ID"} <= set(environment) else ""
    return secret or environment.get("TORCHELASTIC_RUN_ID") or step.format_map(environment)


def what_a_restart_needs(environment: Mapping[str, str], *, resumes: bool) -> str | None:
    """A warning, if torchrun may restart the workers and they would begin anew then."""
    if int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0")) == 0 or resumes:
        return None
    return (
        "torchrun may restart the workers, and they will begin anew then; resume=auto lets them go on, and "
        "training.elastic=true another number of them"
    )


def _first_host(nodes: str) -> str:
    """The first node of a job, under a name or an address that this machine can use."""
    names = _scontrol("show", "hostnames", nodes).split()
    if not names:
        raise ConfigError("scontrol cannot name this job's hosts; set MASTER_ADDR to the host of rank 0")
    if _resolves(names[0]):
        return names[0]
    # Slurm's names of nodes need not be those of machines.
    address = re.search(r"\bNodeAddr=(\S+)", _scontrol("--oneliner", "show", "node", names[0]))
    return address[1] if address else names[0]


def _scontrol(*words: str) -> str:
    answer = subprocess.run(["scontrol", *words], capture_output=True, text=True, timeout=60, check=False)
    return "" if answer.returncode else answer.stdout


def _resolves(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True
