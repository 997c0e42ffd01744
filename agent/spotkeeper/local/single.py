"""One at a time in a folder: who comes second is told who is there, and changes nothing."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class BusyError(Exception):
    """Another process is at work in the folder; the message says which, and what to do."""


@contextmanager
def only_one(folder: Path, what: str, otherwise: str) -> Iterator[None]:
    """Hold ``folder`` while it is worked in. The kernel lets go of it when this process ends, however it ends.

    The lock is a file beside the folder, ``<folder>.lock``, because the folder itself is removed and made
    anew meanwhile. It stays: to remove it would let two newcomers lock two files of one name.

    Args:
        what: what this process does there, for whoever comes second.
        otherwise: what that one can do instead of waiting.

    Raises:
        BusyError: another process holds it.
    """
    path = folder.resolve().with_name(folder.name + ".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(_words(path, folder, otherwise)) from None
        file.truncate(0)
        file.write(f"{os.getpid()} {what}\n")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def _words(path: Path, folder: Path, otherwise: str) -> str:
    pid, _, what = path.read_text().strip().partition(" ")
    if not pid.isdigit():  # it has only just come, or is about to go
        return f"another process is at work in {folder}: wait until it is done, or {otherwise}"
    return f"{what} is at work in {folder} (pid {pid}): wait until it is done, end it (kill {pid}), or {otherwise}"
