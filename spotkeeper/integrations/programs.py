"""Which program follows a trial, for others on the same machine: each keeps a file locked as long as it lives.

A program on another machine cannot tell; nor one that sees another folder for temporary files.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import re
import socket
import tempfile
from functools import cache
from pathlib import Path

_PREFIX = "spotkeeper-program-"
_NAME = re.compile(rf"{_PREFIX}[a-z0-9_]+\Z")


@cache
def own() -> str:
    """Return the name of this program, for :func:`lives`; "" if it can have no temporary file.

    The file stays locked until the process ends.
    """
    try:
        locked, path = tempfile.mkstemp(prefix=_PREFIX)
    except OSError:
        return ""
    os.fchmod(locked, 0o644)  # other users can lock it only if they can open it
    fcntl.flock(locked, fcntl.LOCK_EX)
    atexit.register(_remove, path, os.getpid())
    return f"{socket.gethostname()}/{Path(path).name}"


os.register_at_fork(after_in_child=own.cache_clear)  # it is another program


def _remove(path: str, pid: int) -> None:
    if os.getpid() == pid:  # not at the end of a fork
        Path(path).unlink(missing_ok=True)


def lives(name: object) -> bool:
    """Whether this is another program, runs, and runs on this machine."""
    host, _, file = str(name).rpartition("/")
    if host != socket.gethostname() or not _NAME.match(file) or name == own():
        return False
    try:
        with (Path(tempfile.gettempdir()) / file).open("rb") as found:
            fcntl.flock(found, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
