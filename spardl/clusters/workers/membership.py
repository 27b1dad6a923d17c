"""Finds the rank, world size, address and device of a worker, from variables that torchrun or srun sets."""

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
    "restart_warning",
]


# Sockets that listen on one address of this machine instead of on all of them.


# The ioctl request for the IPv4 address of an interface, and the position of the address in the reply.
_SIOCGIFADDR, _ADDRESS = 0x8915, slice(20, 24)
_QUEUE = 4096


def address_of(interface: str) -> str | None:
    """Returns the IPv4 address of a network interface; ``None`` if the interface is missing or has no address."""
    # An ioctl needs any open socket; this one sends nothing.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[_ADDRESS])


def listen(address: str, port: int) -> socket.socket:
    """Opens a socket that listens on one address of this machine.

    Args:
        address: IPv4 or IPv6 address of this machine.
        port: Port to listen on; 0 for any free port.

    Raises:
        OSError: If the port is in use, or the address does not belong to this machine.
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
    """Opens a socket that listens on the address of this machine to which a host name resolves.

    Args:
        host: Host name or address that the other processes connect to.
        port: Port to listen on; 0 for any free port.
        alone: Whether all other processes run on this machine. If not, loopback addresses are skipped, because other
            machines cannot reach them.

    Returns:
        The socket, or ``None`` if ``host`` resolves to no address of this machine, for example behind address
        translation.

    Raises:
        OSError: If the port is in use, or the name does not resolve.
    """
    for address in dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)):
        if not (alone or address == host) and ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            continue
        try:
            return listen(address, port)
        except OSError as error:
            # These two mean that the address is not usable here; any other error concerns the port.
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    return None


# Assignment of the GPUs of a machine to its workers.


def pick_device(wanted: str, local_rank: int, local_size: int, option: str = "cluster.device") -> torch.device:
    """Returns the device of a worker. Call it in the worker's process only, because CUDA cannot be used after a fork.

    Args:
        wanted: Device to use: cpu, cuda, or auto.
        local_rank: Rank of the worker on this machine.
        local_size: Number of workers that share the GPUs of this machine.
        option: Name of the option that ``wanted`` comes from, for error messages.

    Raises:
        ConfigError: If there are fewer GPUs than requested.
    """
    count = count_gpus(wanted, local_size, option)
    if count < local_size:
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % count)
    torch.cuda.set_device(device)
    return device


def count_gpus(wanted: str, sharing: int, option: str = "cluster.device") -> int:
    """Returns the number of GPUs of this machine that workers may use; 0 without a GPU, or if ``wanted`` is cpu.

    Args:
        wanted: Device to use: cpu, cuda, or auto.
        sharing: Number of workers of this machine that need a GPU.
        option: Name of the option that ``wanted`` comes from, for error messages.

    Raises:
        ConfigError: If there are fewer GPUs than requested.
    """
    if wanted == "cpu":
        return 0
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cuda" and count < sharing:
        raise ConfigError(
            f"{option}=cuda needs {sharing} GPU(s) on this machine, one per process, but torch finds {count}; use "
            f"fewer workers, or {option}=cpu"
        )
    return count


class Membership(NamedTuple):
    """Rank of this process among the workers, and address of rank 0.

    Attributes:
        rank: Rank of this process.
        size: Number of workers (world size).
        local_rank: Rank of this process on its machine.
        local_size: Number of workers that share the GPUs of this machine.
        host: Host name or address of rank 0.
        port: Port on which rank 0 listens.
        served: Whether the agent of torchrun runs the key-value store at this address; otherwise rank 0 runs it.
        alone: Whether all workers are known to run on this machine.
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
    """Reads the environment variables that torchrun or srun sets; returns ``None`` if neither started this process.

    Raises:
        ConfigError: If the rank, the number of workers or the port in a variable is invalid.
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
    # SLURM_PROCID alone does not suffice: a batch script also has it, but only srun runs all tasks, in a step.
    if "SLURM_STEP_NODELIST" in environment and int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return Membership(
            int(environment["SLURM_PROCID"]),
            int(environment["SLURM_STEP_NUM_TASKS"]),
            int(environment["SLURM_LOCALID"]),
            1,  # srun assigns GPUs according to its own options
            environment.get("MASTER_ADDR") or _first_host(environment["SLURM_STEP_NODELIST"]),
            # Derived from the job id, so that all tasks agree on it and two jobs on one node rarely collide.
            _port(environment) if environment.get("MASTER_PORT") else 15000 + int(environment["SLURM_JOB_ID"]) % 20000,
            alone=environment.get("SLURM_STEP_NUM_NODES") == "1",
        )
    return None


def find_node(environment: Mapping[str, str]) -> tuple[int, int]:
    """Reads the number of workers of this node, and the position of this one among them, from torchrun or srun.

    Raises:
        ConfigError: If neither started this process, a variable is invalid, or the nodes have different numbers of
            workers.
    """
    if "LOCAL_WORLD_SIZE" in environment:
        count = _number(environment, "LOCAL_WORLD_SIZE", least=1)
        return count, _number(environment, "LOCAL_RANK", most=count - 1)
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE")
    if tasks is None:
        raise ConfigError(
            "ranks_per_node='auto' needs LOCAL_WORLD_SIZE or SLURM_STEP_TASKS_PER_NODE in the environment; start the "
            "workers with torchrun or srun, or pass the number"
        )
    found = re.fullmatch(r"([1-9]\d*)(\(x\d+\))?", tasks)
    if found is None:
        raise ConfigError(
            f"ranks_per_node='auto' needs equally many workers on each node, but SLURM_STEP_TASKS_PER_NODE={tasks}; "
            "use srun --ntasks-per-node"
        )
    return int(found[1]), _number(environment, "SLURM_LOCALID", most=int(found[1]) - 1)


def _port(environment: Mapping[str, str]) -> int:
    return _number(environment, "MASTER_PORT", least=1, most=2**16 - 1)


def _number(
    environment: Mapping[str, str], name: str, default: str = "", *, least: int = 0, most: int | None = None
) -> int:
    text = environment.get(name, default)
    if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
        bounds = f"from {least} to {most}" if most is not None else f"of at least {least}"
        raise ConfigError(f"{name}={text} in the environment is not valid; set it to an integer {bounds}")
    return int(text)


def leads(environment: Mapping[str, str]) -> bool:
    """Returns whether this process acts for all workers, that is, it is rank 0 or the only process."""
    return environment.get("RANK" if "RANK" in environment else "SLURM_PROCID", "0") == "0"


def find_secret(environment: Mapping[str, str]) -> str:
    """Returns a text that identifies the workers of one run among runs that use the same port.

    It is the value of ``SPARDL_SECRET`` if that is set, for example by ``slurm/step.sh``. Otherwise it is the name of
    the run in torchrun or Slurm, which is not confidential but differs between runs.
    """
    secret = environment.get("SPARDL_SECRET")
    step = "{SLURM_JOB_ID}.{SLURM_STEP_ID}" if {"SLURM_JOB_ID", "SLURM_STEP_ID"} <= set(environment) else ""
    return secret or environment.get("TORCHELASTIC_RUN_ID") or step.format_map(environment)


def restart_warning(environment: Mapping[str, str], *, resumes: bool) -> str | None:
    """Returns a warning if torchrun may restart the workers and training would then start from step 0, or ``None``."""
    if int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0")) == 0 or resumes:
        return None
    return (
        "torchrun may restart the workers, which then start training from step 0; use resume=auto to continue, and "
        "training.elastic=true to continue with a different number of workers"
    )


def _first_host(nodes: str) -> str:
    """Returns the first node of a job, as a name or address that this machine can resolve."""
    names = _scontrol("show", "hostnames", nodes).split()
    if not names:
        raise ConfigError(f"scontrol lists no hosts for {nodes}; set MASTER_ADDR to the host of rank 0")
    if _resolves(names[0]):
        return names[0]
    # Node names of Slurm need not be host names.
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
