"""Asking the root helper, where the agent is not root itself."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
from msgspec import Struct

from spotkeeper.spec import codec
from spotkeeper.vm.power import has_units
from spotkeeper.vm.roothelper import COMMAND_S, SOCKET, RefusedError


class _Answer(Struct, frozen=True):
    ok: bool
    why: str = "request"
    error: str = ""


def needed() -> bool:
    """Whether this process must ask: it has no rights, and a helper beside it."""
    return has_units()


def ask(op: str, *, at: Path = SOCKET, **values: str) -> None:
    """Have one thing done.

    Raises:
        RefusedError: it was refused, went wrong, or nobody answers.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(3 * COMMAND_S)  # blkid, mkfs and mount, one after the other
            sock.connect(str(at))
            sock.send(msgspec.json.encode({"op": op, **values}))
            answer = codec.decode(sock.recv(4096), _Answer)
    except (OSError, msgspec.DecodeError) as error:
        raise RefusedError(op, f"the root helper does not answer: {error}") from None
    if not answer.ok:
        raise RefusedError(answer.why, answer.error)
