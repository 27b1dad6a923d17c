"""First process in the namespaces of a network lab, started by ``netlab.py``.

It sets up the network, runs a command as every worker, terminates the workers, and reports the counts of their
interfaces. The whole lab ends with this process, so nothing needs to be cleaned up.
"""

from __future__ import annotations

import json
import math
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

SUBNET = "10.77.0"
PORT = 29500  # free in every lab, because each has its own network
# Bytes. A burst below the largest segment of 68 KB halves the rate of a link; a large burst passes whole messages.
BURST = 131072
# Gbit/s above which the burst must cover one tick of the kernel, and its seconds.
BURST_ABOVE, BURST_SECONDS = 2.0, 1 / 250
# Verified range in Gbit/s on two cores: the minimum, and the maximum for up to 4, 8 and 16 workers.
LEAST_TRUSTED, TRUSTED = 0.1, ((4, 5.0), (8, 2.5), (16, 1.0))
DELAY_TRUSTED = (0.5, 10.0)  # verified range in milliseconds
IN_FLIGHT = 2.5  # megabytes in flight per connection, as allowed by the kernel's default buffers
LAST_LINES = 1.0  # seconds to forward remaining output; a surviving child of a worker keeps the pipe open
SET_UP, GRACE = 30.0, 10.0  # seconds for one program that sets up the network; for workers after SIGTERM
BAD_INPUT, TIMED_OUT, INTERRUPTED, TERMINATED = 2, 124, 130, 143
DELAY_LINE = Path(__file__).resolve().with_name("delay_line.py")


class LabError(Exception):
    """An error that a user can act on, in one line."""


@dataclass(frozen=True)
class Lab:
    """Workers around a bridge, with links of one bandwidth in both directions.

    Attributes:
        workers: Number of workers.
        gbit: Bandwidth of each link and direction in Gbit/s; infinity sets no limit.
        timeout: Time limit of all workers in seconds.
        delay_ms: One-way delay of messages in milliseconds.

    Raises:
        LabError: If a value is out of range.
    """

    workers: int
    gbit: float
    timeout: float
    delay_ms: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= 250:
            raise LabError(f"--workers must be from 1 to 250, got {self.workers}")
        if not (0.001 <= self.gbit <= 100 or self.gbit == math.inf):
            raise LabError(f"--gbit must be from 0.001 to 100, or inf for links without a limit, got {self.gbit:g}")
        if not 0 < self.timeout <= 1e6:
            raise LabError(f"--timeout must be above 0 and at most 1e6 seconds, got {self.timeout}")
        if not (0.01 <= self.delay_ms <= 1000 or self.delay_ms == 0):
            raise LabError(f"--delay-ms must be from 0.01 to 1000, or 0 for no delay, got {self.delay_ms:g}")

    def doubts(self) -> Iterator[str]:
        """Yields reasons why bandwidth or delay may differ from the requested ones."""
        (least, most), bounded = DELAY_TRUSTED, not math.isinf(self.gbit)
        limit = next((limit for count, limit in TRUSTED if self.workers <= count), 0.0)
        if bounded and not LEAST_TRUSTED <= self.gbit <= limit:
            known = ", ".join(f"{each:g} with {count}" for count, each in TRUSTED)
            yield (
                f"on two cores, links had the requested bandwidth from {LEAST_TRUSTED:g} Gbit/s to {known} workers; "
                f"{self.gbit:g} with {self.workers} may differ"
            )
        if self.delay_ms and not least <= self.delay_ms <= most:
            yield f"delays were verified from {least:g} to {most:g} ms; {self.delay_ms:g} ms may differ"
        elif self.delay_ms and bounded and self.gbit > (carried := 8 * IN_FLIGHT / (2 * self.delay_ms)):
            yield f"about {IN_FLIGHT} MB of a connection are in flight; at {self.delay_ms:g} ms, {carried:.2g} Gbit/s"

    def shaping(self, device: str) -> list[str]:
        """Lines for ``tc`` that limit the outgoing traffic of a device."""
        if math.isinf(self.gbit):
            return []
        rate = round(self.gbit * 1e9)
        burst = round(rate / 8 * BURST_SECONDS) if self.gbit > BURST_ABOVE else BURST
        return [f"qdisc add dev {device} root tbf rate {rate}bit burst {burst} latency 50ms"]

    def wiring(self) -> Iterator[tuple[list[str], list[str]]]:
        """Programs with the lines that each has to execute, in order."""
        yield ["ip"], ["link add bridge type bridge", "link set bridge up"]
        for rank in range(self.workers):
            name, link = namespace(rank), f"link-w{rank}"
            device = [f"link add {link} type veth peer name eth0 netns {name}", f"link set {link} master bridge up"]
            yield ["ip"], [f"netns add {name}", *device]
            yield (
                ["ip", "-n", name],
                ["link set lo up", f"addr add {address(rank)}/24 dev eth0", "link set eth0 up"],
            )
            yield ["tc", "-n", name], self.shaping("eth0")
            # Traffic to a worker leaves the bridge at the other end of its link.
            yield ["tc"], self.shaping(link)

    def environment(self, rank: int) -> dict[str, str]:
        """Returns the environment for ``torch.distributed``, as torchrun would set it."""
        return {
            "OMP_NUM_THREADS": "1",  # as torchrun does: workers share the cores
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(self.workers),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self.workers),
            "MASTER_ADDR": address(0),
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": "eth0",
        }


class Traffic(NamedTuple):
    """Bytes that an interface counted: with headers, but with those of one packet for each large segment."""

    sent: int
    received: int


class Ended(NamedTuple):
    """A process that ended, and its exit code."""

    who: str
    code: int


def namespace(rank: int) -> str:
    """Returns the network namespace of a worker."""
    return f"netlab-w{rank}"


def address(rank: int) -> str:
    """Address of a worker."""
    return f"{SUBNET}.{rank + 1}"


def exit_code(code: int) -> int:
    """Returns the exit code as in a shell: 128 plus the signal number for a killed process."""
    return 128 - code if code < 0 else code


def status(process: int) -> list[str]:
    """Fields of ``/proc/PID/stat`` after the name, starting with the state; empty if the process has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def tool(name: str) -> str | None:
    """Returns the path of a program; programs of administrators are also found outside the PATH of users."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def attempt(words: Sequence[str], lines: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Runs a program with lines on its standard input.

    Raises:
        LabError: If it does not end.
    """
    command, text = [tool(words[0]) or words[0], *words[1:]], "".join(f"{line}\n" for line in lines)
    try:
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=SET_UP, check=False)
    except subprocess.TimeoutExpired as error:
        raise LabError(f"{' '.join(words)} timed out after {SET_UP:g} s; check the load of this machine") from error


def call(words: Sequence[str], lines: Sequence[str] = ()) -> str:
    """Runs a program, and returns its output.

    Raises:
        LabError: If it fails, or does not end.
    """
    done = attempt(words, lines)
    if done.returncode:
        raise LabError(f"{' '.join([*words, *lines])}: {'; '.join(done.stderr.splitlines())}")
    return done.stdout


def traffic(rank: int) -> Traffic:
    """Returns the bytes that the interface of a worker has counted so far."""
    (link,) = json.loads(call(["ip", "-json", "-statistics", "-n", namespace(rank), "link", "show", "dev", "eth0"]))
    return Traffic(link["stats64"]["tx"]["bytes"], link["stats64"]["rx"]["bytes"])


def perform(lab: Lab, command: Sequence[str], file: str | None) -> int:
    """Sets up the network, runs the workers, and reports the traffic.

    Args:
        lab: Description of the network.
        command: Command of the workers.
        file: File for the report as JSON, or ``None``.

    Returns:
        The exit code.

    Raises:
        LabError: If the network cannot be set up.
    """
    call(["mount", "-t", "tmpfs", "netlab", "/run"])
    for words, lines in lab.wiring():
        call([*words, "-batch", "-"], lines)
    delay_line = start_delay_line(lab) if lab.delay_ms else None
    before = [traffic(rank) for rank in range(lab.workers)]
    start = time.monotonic()
    code = supervise(lab, command, delay_line)
    seconds = time.monotonic() - start
    after = [traffic(rank) for rank in range(lab.workers)]
    counted = [
        Traffic(new.sent - old.sent, new.received - old.received) for old, new in zip(before, after, strict=True)
    ]
    print(table(counted), file=sys.stderr, flush=True)
    if delay_line and (lost := sum(dropped(rank) for rank in range(lab.workers))):
        print(f"warning: full queues of the delay line dropped {lost} packets", file=sys.stderr, flush=True)
    if file:
        # Importing spardl imports torch, which takes seconds.
        from spardl.basics.files import write_atomically  # noqa: PLC0415

        write_atomically(Path(file), (json.dumps(report(lab, counted, seconds, code), indent=2) + "\n").encode())
    return code


def table(counted: Sequence[Traffic]) -> str:
    """Returns the bytes of each worker and in total."""
    total = Traffic(sum(row.sent for row in counted), sum(row.received for row in counted))
    rows = [*((str(rank), address(rank), row) for rank, row in enumerate(counted)), ("all", "", total)]
    lines = [f"{who:>6}  {where:<14}{row.sent:>16,}{row.received:>16,}" for who, where, row in rows]
    return "\n".join([f"{'worker':>6}  {'address':<14}{'bytes sent':>16}{'bytes received':>16}", *lines])


def report(lab: Lab, counted: Sequence[Traffic], seconds: float, code: int) -> dict[str, Any]:
    """Returns the table as JSON data; ``gbit`` is null without a limit."""
    shaped = asdict(lab) | {"gbit": None if math.isinf(lab.gbit) else lab.gbit}
    interfaces = [{"rank": rank, "address": address(rank), **row._asdict()} for rank, row in enumerate(counted)]
    return {**shaped, "seconds": seconds, "exit_code": code, "interfaces": interfaces}


def start_delay_line(lab: Lab) -> subprocess.Popen[str]:
    """Delays packets to the workers in a process that lives as long as the lab.

    Raises:
        LabError: If the delay line cannot start.
    """
    names = [namespace(rank) for rank in range(lab.workers)]
    line = subprocess.Popen(
        [sys.executable, str(DELAY_LINE), str(lab.delay_ms), *names],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert line.stdout
    if (said := line.stdout.readline().strip()) != "ready":
        raise LabError(
            f"--delay-ms: {said or 'the delay line ended'}; it needs a kernel with CONFIG_NETFILTER_NETLINK_QUEUE"
        )
    queueing = ["-A", "INPUT", "-i", "eth0", "-j", "NFQUEUE", "--queue-num", "0", "--queue-bypass"]
    for name in names:
        call(["ip", "netns", "exec", name, str(tool("iptables")), *queueing])
    return line


def dropped(rank: int) -> int:
    """Packets to a worker that were dropped because a buffer was full."""
    fields = call(["ip", "netns", "exec", namespace(rank), "cat", "/proc/net/netfilter/nfnetlink_queue"]).split()
    return int(fields[5]) + int(fields[6]) if fields else 0


def supervise(lab: Lab, command: Sequence[str], delay_line: subprocess.Popen[str] | None) -> int:
    """Runs a command in each namespace.

    All workers are terminated if one fails, at the timeout, or when the launcher or the delay line ends.

    Returns:
        The exit code of the first process that failed, or 0.
    """
    ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()
    limit = time.monotonic() + lab.timeout
    _in_thread(_watch_lifeline, ended)
    if delay_line:
        _in_thread(_watch, "the delay line", delay_line, ended)
    workers = [start(lab, rank, command) for rank in range(lab.workers)]
    relays = [_in_thread(_relay, rank, worker.stdout) for rank, worker in enumerate(workers) if worker.stdout]
    for rank, worker in enumerate(workers):
        _in_thread(_watch, f"worker {rank}", worker, ended)
    code = 0
    try:
        for _ in workers:
            who, code = ended.get(timeout=max(0.0, limit - time.monotonic()))
            if code:
                print(f"error: {who} ended with exit code {code}; terminating all workers", file=sys.stderr, flush=True)
                break
    except queue.Empty:
        code = TIMED_OUT
        print(f"error: workers did not end within {lab.timeout:g} s; raise --timeout", file=sys.stderr, flush=True)
    end(workers)
    limit = time.monotonic() + LAST_LINES
    for thread in relays:
        thread.join(timeout=max(0.0, limit - time.monotonic()))
    return code


def start(lab: Lab, rank: int, command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Starts a worker in its namespace, in a new session so that its ``kill 0`` does not reach the others."""
    return subprocess.Popen(
        [str(tool("ip")), "netns", "exec", namespace(rank), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if rank else None,
        stderr=subprocess.STDOUT if rank else None,
        env=lab.environment(rank),
        start_new_session=True,
    )


def end(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    """Terminates the workers with SIGTERM, then the remaining ones with SIGKILL."""
    for worker in workers:
        worker.terminate()
    limit = time.monotonic() + GRACE
    for worker in workers:
        try:
            worker.wait(timeout=max(0.0, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait(timeout=GRACE)


def _in_thread(function: Any, *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


def _watch(who: str, worker: subprocess.Popen[Any], ended: queue.SimpleQueue[Ended]) -> None:
    ended.put(Ended(who, exit_code(worker.wait())))


def _watch_lifeline(ended: queue.SimpleQueue[Ended]) -> None:
    """Waits until the launcher closes its end of the pipe or dies; it never writes."""
    os.read(sys.stdin.fileno(), 1)
    ended.put(Ended("the launcher", TERMINATED))


def _relay(rank: int, stream: IO[bytes]) -> None:
    """Forwards the lines of a worker, prefixed with its rank."""
    for line in stream:
        os.write(sys.stderr.fileno(), b"[%d] %s\n" % (rank, line.rstrip(b"\n")))


def main(words: Sequence[str]) -> int:
    """Reads the options of the launcher: the lab, the report file and the command.

    Returns:
        The exit code.
    """
    lab, file, *command = words
    try:
        return perform(Lab(**json.loads(lab)), command, file or None)
    except (LabError, OSError, subprocess.TimeoutExpired) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return BAD_INPUT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
