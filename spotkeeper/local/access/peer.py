"""Finds which user of this machine owns the client end of a loopback connection.

The kernel tells the owner of a single socket through netlink (``sock_diag``) in microseconds. Reading ``/proc/net/tcp``
takes milliseconds on a busy machine, and is the fallback for sandboxes without ``sock_diag``, such as gVisor.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from pathlib import Path
from typing import Protocol

ESTABLISHED = 1  # only this state counts: the kernel names root as the owner of a closed socket
_EVERYONE = 2**32 - 1  # how many users the first user namespace has
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _REQUEST = 4, 20, 1
_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr
_QUERY = struct.Struct("=BBBxI")  # struct inet_diag_req_v2 up to its field `id`
_PORTS = struct.Struct("!HH")
_ID_REST = struct.Struct("=4s12x4s12xIII")  # struct inet_diag_sockid after the ports
_FOUND = struct.Struct("=BB2x48x12xI")  # struct inet_diag_msg up to the user id
_ANY = 2**32 - 1  # no cookie: any socket with these addresses

Address = tuple[str, int]


class Connection(Protocol):
    """An accepted socket, or asyncio's wrapper of an accepted socket."""

    def getpeername(self) -> Address: ...

    def getsockname(self) -> Address: ...


def owner(connection: Connection) -> int | None:
    """Return the user id of the client of an accepted IPv4 connection from this machine; None if unknown."""
    try:
        client, server = connection.getpeername(), connection.getsockname()
        try:
            uid = by_netlink(client, server)
        except OSError:
            uid = by_table(client, server)
        connection.getpeername()  # fails after a reset: then another process may own the client's port
    except OSError:
        return None
    return None if uid is not None and _stands_for_many(uid) else uid


def by_netlink(client: Address, server: Address) -> int | None:
    """Ask the kernel which user owns the client's socket; OSError if this kernel or sandbox lacks ``sock_diag``."""
    # A query with AF_INET also finds an IPv6 socket that is connected to an IPv4 address.
    addresses = (socket.inet_aton(client[0]), socket.inet_aton(server[0]))
    query = _QUERY.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, 1 << ESTABLISHED)
    query += _PORTS.pack(client[1], server[1]) + _ID_REST.pack(*addresses, 0, _ANY, _ANY)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as netlink:
        netlink.settimeout(1.0)
        netlink.send(_HEADER.pack(_HEADER.size + len(query), _SOCK_DIAG_BY_FAMILY, _REQUEST, 0, 0) + query)
        answer = netlink.recv(4096)
    if _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
        raise OSError("sock_diag refused the query or found no such socket")
    _family, state, uid = _FOUND.unpack_from(answer, _HEADER.size)
    return int(uid) if state == ESTABLISHED else None


def by_table(client: Address, server: Address) -> int | None:
    """Return the client's user id from the kernel's tables of sockets; OSError if a table cannot be read."""
    for table in _TABLES:
        if not table.exists():  # without IPv6
            continue
        mapped = table.name == "tcp6"
        wanted = [_hex(client, mapped), _hex(server, mapped), f"{ESTABLISHED:02X}"]
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[1:4] == wanted:
                return int(fields[7])
    return None


def _hex(address: Address, mapped: bool) -> str:
    """Return an IPv4 address and port as /proc/net/tcp writes them, or if ``mapped``, as /proc/net/tcp6 does."""
    host = socket.inet_aton(address[0])
    words = [bytes(4), bytes(4), b"\0\0\xff\xff", host] if mapped else [host]  # ::ffff:a.b.c.d
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words) + f":{address[1]:04X}"


def _stands_for_many(uid: int) -> bool:
    """Whether this is the id (65534) that a user namespace shows for every user who has no id in the namespace."""
    if uid != int(Path("/proc/sys/kernel/overflowuid").read_text()):
        return False
    mapped = sum(int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines())
    return mapped < _EVERYONE


def is_operators(connection: Connection) -> bool:
    """Whether the client belongs to the user who runs this process."""
    return owner(connection) == os.getuid()
