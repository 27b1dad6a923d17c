"""Sockets that listen on one address of this machine instead of on all."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import socket
import struct

__all__ = ["address_of", "listen", "listen_as"]

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
