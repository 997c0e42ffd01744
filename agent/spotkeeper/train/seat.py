"""Where saver and trainers meet: a unix socket of type SEQPACKET, one message a packet. Standard library only."""

from __future__ import annotations

import array
import contextlib
import errno
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotkeeper.train.control import Commit, Fault

MESSAGE = 1 << 20

Answer = dict[str, Any]  # as JSON; the table in ``saver.py`` has them


@dataclass
class Peer:
    """A connected trainer, as the saver sees it."""

    sock: socket.socket
    gen: int = -1
    folder: Path | None = None
    keep: int = 2

    def tell(self, message: Answer, fd: int | None = None) -> None:
        """Best effort: a trainer that is gone does not hear, and its checkpoint is on disk all the same."""
        rights = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        with contextlib.suppress(ConnectionError, BlockingIOError):
            self.sock.sendmsg([json.dumps(message).encode()], rights)

    def fail(self, fault: Fault, why: str, commit: Commit | None = None) -> None:
        """What it asked for came to nothing. ``commit``: the save that it was."""
        of = {} if commit is None else {"gen": commit.gen, "step": commit.step}
        self.tell({**of, "event": "failed", "fault": int(fault), "why": why})


@contextlib.contextmanager
def address(path: Path) -> Iterator[str]:
    """A name for ``path`` that fits into the 108 bytes of a unix address, however deep it lies."""
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


def listen(path: Path) -> socket.socket:
    """A listening socket at ``path``; one that a dead saver left is replaced.

    Raises:
        FileExistsError: a saver answers there already.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with address(path) as name:
        with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
            probe = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with probe:
                probe.connect(name)
            sock.close()
            raise FileExistsError(errno.EEXIST, "a saver answers there already", str(path))
        path.unlink(missing_ok=True)
        old = os.umask(0o117)
        try:
            sock.bind(name)
        finally:
            os.umask(old)
    sock.listen()
    return sock
