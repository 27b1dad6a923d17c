"""Delays the packets that arrive in some network namespaces; started by ``netlab.py``.

python scripts/labs/delay_line.py MILLISECONDS NAMESPACE ...

For machines whose kernel has no netem. A rule of iptables puts the arriving packets of a namespace into queue 0 of the
kernel (NFQUEUE). The kernel reports the number of each packet to this process and keeps the packet until the verdict.
All packets have the same delay, so they leave in the order of their numbers, and one verdict releases all packets up to
a number. No packet data is copied, and large segments stay whole (linux/netfilter/nfnetlink_queue.h).

The process prints ``ready`` when it holds all queues, or the reason why it cannot, and runs until it is terminated.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

READY, FAILED = "ready", 1
NAMESPACES = Path("/run/netns")

# Values of the kernel's interface.
NETLINK_NETFILTER, SOL_NETLINK, NETLINK_NO_ENOBUFS, SO_RCVBUFFORCE, CLONE_NEWNET = 12, 270, 5, 33, 0x40000000
ERROR, REQUEST, ACKNOWLEDGE = 2, 1, 4  # a message's type; flags of a message
PACKET, CONFIG, VERDICTS = 0x300, 0x302, 0x303  # types of the subsystem of queues
COMMAND, COPYING, LENGTH, MASK, FLAGS = 1, 2, 3, 4, 5  # attributes of CONFIG
ABOUT_PACKET, VERDICT = 1, 2  # attributes of PACKET and VERDICTS
BIND, COPY_NO_DATA, WHOLE_SEGMENTS, ACCEPT = 1, 1, 4, 1  # values

LONGEST = 65536  # packets in a queue; further packets are dropped, as by a device with a full buffer
MEMORY = 64 << 20  # bytes of unread packet reports; the kernel allows less without root
AT_ONCE = 256  # packets read before due packets are released


class Held:
    """Packets of one queue in the order of their arrival, each delayed by some seconds."""

    def __init__(self, delay: float) -> None:
        self._delay = delay
        self._waiting: deque[tuple[float, int]] = deque()

    def add(self, number: int, now: float) -> None:
        """Adds a packet that has just arrived."""
        self._waiting.append((now + self._delay, number))

    def due(self) -> float | None:
        """Returns the release time of the first packet, or ``None`` if the queue is empty."""
        return self._waiting[0][0] if self._waiting else None

    def pop(self, now: float) -> int | None:
        """Removes all packets that are due; returns the number of the last one, or ``None``."""
        last = None
        while self._waiting and self._waiting[0][0] <= now:
            last = self._waiting.popleft()[1]
        return last


class Queue:
    """Queue 0 of the network namespace of this thread, which delays each packet by some seconds.

    Raises:
        OSError: If the kernel has no such queue, or another process holds it.
    """

    def __init__(self, delay: float) -> None:
        self.held = Held(delay)
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
        self._socket.bind((0, 0))
        self._enlarge_buffer()
        self._socket.send(binding())
        check(self._socket.recv(4096))
        self._socket.setblocking(False)

    def fileno(self) -> int:
        """Returns the file descriptor of the socket, for ``select``."""
        return self._socket.fileno()

    def take_in(self) -> None:
        """Reads the reports of arrived packets."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(AT_ONCE):
                self.held.add(packet_number(self._socket.recv(4096)), time.monotonic())

    def let_go(self, now: float) -> None:
        """Releases the packets that are due."""
        last = self.held.pop(now)
        if last is not None:
            self._socket.send(acceptance(last))

    def _enlarge_buffer(self) -> None:
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, MEMORY)
        except PermissionError:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, MEMORY)
        # A full buffer drops packets, which TCP sends again. Without this option the next read would fail with ENOBUFS.
        self._socket.setsockopt(SOL_NETLINK, NETLINK_NO_ENOBUFS, 1)


def message(kind: int, flags: int, *attributes: bytes) -> bytes:
    """Returns the netlink message to the kernel about queue 0."""
    body = struct.pack(">BBH", socket.AF_UNSPEC, 0, 0) + b"".join(attributes)
    return struct.pack("=IHHII", 16 + len(body), kind, flags, 0, 0) + body


def attribute(kind: int, layout: str, *values: int) -> bytes:
    """Returns the attribute of a message; the kernel expects numbers in network byte order."""
    value = struct.pack(f">{layout}", *values)
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def binding() -> bytes:
    """Returns the request to bind the queue, as one message so that no packet arrives before all settings apply."""
    return message(
        CONFIG,
        REQUEST | ACKNOWLEDGE,
        attribute(COMMAND, "BBH", BIND, 0, socket.AF_INET),
        attribute(COPYING, "IB", 0, COPY_NO_DATA),
        attribute(LENGTH, "I", LONGEST),
        attribute(MASK, "I", WHOLE_SEGMENTS),
        attribute(FLAGS, "I", WHOLE_SEGMENTS),
    )


def acceptance(last: int) -> bytes:
    """Returns the verdict that releases all packets up to a number."""
    return message(VERDICTS, REQUEST, attribute(VERDICT, "II", ACCEPT, last))


def check(datagram: bytes) -> None:
    """Checks the kernel's answer to a request.

    Raises:
        OSError: If the kernel refused the request.
    """
    kind, reason = struct.unpack_from("=4xH10xi", datagram)
    if kind == ERROR and reason:
        raise OSError(-reason, os.strerror(-reason))


def packet_number(datagram: bytes) -> int:
    """Returns the number of the packet that a message of the kernel reports.

    Raises:
        OSError: If the message reports an error or no packet.
    """
    check(datagram)
    place = 20
    while place + 8 <= len(datagram):
        length, kind = struct.unpack_from("=HH", datagram, place)
        if kind == ABOUT_PACKET:
            number: int = struct.unpack_from(">I", datagram, place + 4)[0]
            return number
        place += max(4, (length + 3) & ~3)
    raise OSError(errno.EPROTO, "message from the kernel has no packet number")


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Enters a network namespace for the duration of the context."""
    with Path("/proc/self/ns/net").open() as home, (NAMESPACES / namespace).open() as there:
        _enter(there.fileno())
        try:
            yield
        finally:
            _enter(home.fileno())


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def hurry() -> None:
    """Requests the highest timer resolution and priority that the kernel allows this process."""
    with contextlib.suppress(OSError):
        Path("/proc/self/timerslack_ns").write_text("1")
    with contextlib.suppress(PermissionError):  # allowed only for root of the machine
        os.setpriority(os.PRIO_PROCESS, 0, -20)


def work(queues: Sequence[Queue]) -> None:
    """Reads and releases packets in an endless loop."""
    while True:
        due = min((due for queue in queues if (due := queue.held.due()) is not None), default=None)
        wait = None if due is None else max(0.0, due - time.monotonic())
        for queue in select.select(queues, [], [], wait)[0]:
            queue.take_in()
        now = time.monotonic()
        for queue in queues:
            queue.let_go(now)


def main(words: Sequence[str]) -> int:
    """Delays packets until the process is terminated, and returns the exit code after a failure."""
    delay, queues = float(words[0]) / 1e3, []
    try:
        for namespace in words[1:]:
            with inside(namespace):
                queues.append(Queue(delay))
        print(READY, flush=True)
        hurry()
        work(queues)
    except OSError as error:
        print(error, flush=True)
    return FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
