"""Which program follows a trial, for others on the same machine: each keeps a file locked as long as it lives.

A program on another machine cannot tell; nor one that sees another folder for temporary files.
"""

from __future__ import annotations

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
    """Return the name of this program, for :func:`lives`. Its file stays locked until the process ends."""
    file = tempfile.NamedTemporaryFile(prefix=_PREFIX)  # noqa: SIM115 - open until the process ends
    os.fchmod(file.fileno(), 0o644)  # other users can lock it only if they can open it
    fcntl.flock(file, fcntl.LOCK_EX)
    _files.append(file)
    return f"{socket.gethostname()}/{Path(file.name).name}"


_files: list[object] = []


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
