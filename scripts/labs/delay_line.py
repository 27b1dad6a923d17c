"""A delay line: what arrives in some network namespaces waits there before anybody gets it. ``netlab.py`` starts it.

python scripts/labs/delay_line.py MILLISECONDS NAMESPACE ...

For machines whose kernel has no netem. A rule of iptables puts the packets that arrive in a namespace into queue 0 of
the kernel (NFQUEUE), which tells this process the number of each and keeps the packet until the verdict. All wait
equally long, so they leave in the order of their numbers, and one verdict is enough for all up to a number. Of the
packets nothing is copied, and large segments stay whole (linux/netfilter/nfnetlink_queue.h).

It prints ``ready`` when all queues are its own, or why it cannot be, and works until it is ended.
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

LONGEST = 65536  # packets in a queue; more are dropped, as by any device whose memory is full
MEMORY = 64 << 20  # bytes of packets' numbers that were not read yet; without root the kernel allows less
AT_ONCE = 256  # packets taken in before others are let go


class Held:
    """Packets of one queue, in the order of arrival.

    Args:
        delay: seconds that each is held.
    """

    def __init__(self, delay: float) -> None:
        self._delay = delay
        self._waiting: deque[tuple[float, int]] = deque()

    def add(self, number: int, now: float) -> None:
        """Takes in a packet that has just arrived."""
        self._waiting.append((now + self._delay, number))

    def due(self) -> float | None:
        """When the first may go; ``None`` if there is none."""
        return self._waiting[0][0] if self._waiting else None

    def pop(self, now: float) -> int | None:
        """The number of the last that may go by now, and all before it with it; ``None`` if none may."""
        last = None
        while self._waiting and self._waiting[0][0] <= now:
            last = self._waiting.popleft()[1]
        return last


class Queue:
    """Queue 0 of the network namespace that this thread is in.

    Args:
        delay: seconds that each packet is held.

    Raises:
        OSError: if the kernel has no such queue, or it belongs to somebody else.
    """

    def __init__(self, delay: float) -> None:
        self.held = Held(delay)
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
        self._socket.bind((0, 0))
        self._make_room()
        self._socket.send(binding())
        check(self._socket.recv(4096))
        self._socket.setblocking(False)

    def fileno(self) -> int:
        """For ``select``."""
        return self._socket.fileno()

    def take_in(self) -> None:
        """Reads of packets that have arrived."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(AT_ONCE):
                self.held.add(packet_number(self._socket.recv(4096)), time.monotonic())

    def let_go(self, now: float) -> None:
        """Accepts the packets whose time has come."""
        last = self.held.pop(now)
        if last is not None:
            self._socket.send(acceptance(last))

    def _make_room(self) -> None:
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, MEMORY)
        except PermissionError:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, MEMORY)
        # A packet that finds no room is dropped; the next read need not fail for it.
        self._socket.setsockopt(SOL_NETLINK, NETLINK_NO_ENOBUFS, 1)


def message(kind: int, flags: int, *attributes: bytes) -> bytes:
    """A message to the kernel about queue 0."""
    body = struct.pack(">BBH", socket.AF_UNSPEC, 0, 0) + b"".join(attributes)
    return struct.pack("=IHHII", 16 + len(body), kind, flags, 0, 0) + body


def attribute(kind: int, layout: str, *values: int) -> bytes:
    """A part of a message: numbers, which the kernel wants in the order of the network."""
    value = struct.pack(f">{layout}", *values)
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def binding() -> bytes:
    """Asks for all packets of the queue, in one message, so that none comes before all is set."""
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
    """Lets all packets go up to a number."""
    return message(VERDICTS, REQUEST, attribute(VERDICT, "II", ACCEPT, last))


def check(datagram: bytes) -> None:
    """Reads what the kernel says of a request.

    Raises:
        OSError: if it did not do what it was asked for.
    """
    kind, reason = struct.unpack_from("=4xH10xi", datagram)
    if kind == ERROR and reason:
        raise OSError(-reason, os.strerror(-reason))


def packet_number(datagram: bytes) -> int:
    """The number of the packet that the kernel tells of.

    Raises:
        OSError: if it tells of something else.
    """
    check(datagram)
    place = 20
    while place + 8 <= len(datagram):
        length, kind = struct.unpack_from("=HH", datagram, place)
        if kind == ABOUT_PACKET:
            number: int = struct.unpack_from(">I", datagram, place + 4)[0]
            return number
        place += max(4, (length + 3) & ~3)
    raise OSError(errno.EPROTO, "the kernel sent a message without a packet number")


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Enters a network namespace, and comes back."""
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
    """Wakes up as exactly as the kernel allows this process to."""
    with contextlib.suppress(OSError):
        Path("/proc/self/timerslack_ns").write_text("1")
    with contextlib.suppress(PermissionError):  # only the machine's root may
        os.setpriority(os.PRIO_PROCESS, 0, -20)


def work(queues: Sequence[Queue]) -> None:
    """Takes packets in and lets them go, for ever."""
    while True:
        due = min((due for queue in queues if (due := queue.held.due()) is not None), default=None)
        wait = None if due is None else max(0.0, due - time.monotonic())
        for queue in select.select(queues, [], [], wait)[0]:
            queue.take_in()
        now = time.monotonic()
        for queue in queues:
            queue.let_go(now)


def main(words: Sequence[str]) -> int:
    """Delays until it is ended.

    Returns:
        The exit code, if that cannot be.
    """
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
