"""The same errors made by libfiu, below Python: what wrapped functions prove, proved of the C library's calls.

apt install fiu-utils          # Debian, Ubuntu: fiu-run and fiu-ctrl
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from spotkeeper.train.agent_link.control import Commit
from spotkeeper.train.checkpoint import store
from spotkeeper.train.checkpoint.client import Client
from spotkeeper.train.checkpoint.protocol import SaveDurable, SaveFailed
from tests.train.crash.node import LIMIT_S, mixed, served, stage

MISSING = "libfiu is not installed (Debian: apt install fiu-utils)"
_OLD, _HURT, _NEXT = Commit(1, 1), Commit(1, 2), Commit(1, 3)


@dataclass(frozen=True)
class Fault:
    """A failure point of libfiu's. ``error``: '' where a call does less than asked, and none fails."""

    point: str
    error: str


FAULTS = (
    *(Fault(f"posix/io/rw/{call}", error) for call in ("pwrite", "write") for error in ("ENOSPC", "EIO", "EDQUOT")),
    *(Fault("posix/io/sync/fsync", error) for error in ("EIO", "EROFS")),
    *(Fault("posix/io/dir/rename", error) for error in ("ENOSPC", "EROFS")),
    *(Fault("posix/io/oc/open", error) for error in ("ENOSPC", "EIO", "EROFS")),
    Fault("posix/io/rw/pwrite/reduce", ""),
    Fault("posix/io/rw/write/reduce", ""),
)


def installed() -> bool:
    return all(shutil.which(name) for name in ("fiu-run", "fiu-ctrl"))


def hurt(root: Path, fault: Fault) -> list[str]:
    """A save while the fault is on, and one after it; what was wrong."""
    root.mkdir(parents=True)
    folder, prefix = root / "ckpt", root / "fiu"
    run = ("fiu-run", "-x", "-f", str(prefix))
    with served(root, "fiu", run=run) as (path, process), contextlib.closing(Client.connect(path, LIMIT_S)) as client:
        client.hello(folder, 1, 2)
        stage(client, _OLD)
        client.wait(LIMIT_S)
        number = getattr(errno, fault.error) if fault.error else 0
        _control(prefix, process.pid, f"enable name={fault.point},failinfo={number}")
        stage(client, _HURT)
        event = client.wait(LIMIT_S)
        _control(prefix, process.pid, f"disable name={fault.point}")
        wrong = _judge(folder, fault, event)
        stage(client, _NEXT)
        if not isinstance(client.wait(LIMIT_S), SaveDurable) or store.newest(folder).commit != _NEXT:
            wrong.append(f"after it: {store.newest(folder)}")
    if not wrong:
        shutil.rmtree(root)
    return wrong


def _judge(folder: Path, fault: Fault, event: object) -> list[str]:
    newest = store.newest(folder).commit
    if isinstance(event, SaveFailed) and fault.error:
        words = os.strerror(getattr(errno, fault.error))
        return [
            *([] if words in event.why else [f"it was told {event.why!r}, which lacks {words!r}"]),
            *([] if newest == _OLD else [f"the newest is {newest}, want {_OLD}"]),
        ]
    if isinstance(event, SaveDurable) and not fault.error:
        return [f"the newest is {newest}"] if newest != _HURT or mixed(folder, _HURT) else []
    return [f"{fault}: {event}"]


def _control(prefix: Path, pid: int, command: str) -> None:
    subprocess.run(["fiu-ctrl", "-f", str(prefix), "-c", command, str(pid)], check=True, timeout=LIMIT_S)
