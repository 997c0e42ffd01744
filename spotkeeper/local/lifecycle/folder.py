"""Manages a cloud's folder: its settings, its processes, its locks, and its removal.

Every process of a cloud has the cloud's mark in its environment; ``cloud.json`` has it too. If that file is lost, the
mark is read from processes that also name the folder: keeper and control plane name it in their arguments, VMs and
functions in their environment.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import select
import shlex
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec

from spotkeeper.contract import codec
from spotkeeper.local.core import procs
from spotkeeper.local.core.world import Config, Database
from spotkeeper.local.lifecycle.keeper import PID_FILE, read_pid
from spotkeeper.local.machines.host import ROOT

CONFIG = "cloud.json"
KEEPER = "keeper.pid"
CODE = "code"  # digest of the running control plane's code
ENDS_S = 10.0  # real; for a killed process, which may have much memory to return
_MODULES = ("spotkeeper.local.lifecycle.keeper", "spotkeeper.local.server.server")


class LocalCloudError(Exception):
    """Raised if a cloud could not be started or does not answer; the message says what to do."""


class DamagedError(LocalCloudError):
    """Raised if the cloud's settings cannot be read. Processes of the cloud may run; ``force_cleanup`` ends them."""


class BusyError(Exception):
    """Raised if another process works in the folder; the message says which, and what to do."""


@contextmanager
def only_one(folder: Path, work: str, otherwise: str) -> Iterator[None]:
    """Lock ``folder`` for this process; BusyError if another process has it. The lock ends with the process.

    The lock is a file beside the folder, ``<folder>.lock``, because the lock's holder may remove the folder and make it
    again. The lock file stays: if it were removed, two new processes could lock two files of the same name.

    Args:
        work: the command of this process; the message to any other process names it.
        otherwise: what the user can do instead, for the message if another process has the lock.
    """
    path = folder.resolve()
    path = path.with_name(f"{path.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(_busy(path, folder, otherwise)) from None
        file.truncate(0)
        file.write(f"{os.getpid()} {work}\n")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def _busy(path: Path, folder: Path, otherwise: str) -> str:
    pid, _, work = path.read_text().strip().partition(" ")
    if not pid.isdecimal():  # the other process has just started, or is about to end
        return f"another process is at work in {folder}: wait until it ends, or {otherwise}"
    return f"{work} is at work in {folder} (pid {pid}): wait until it ends, end it (kill {pid}), or {otherwise}"


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Lock the file ``lock`` in the folder, so that two ``up`` at the same time start one cloud.

    It waits for the lock. :func:`only_one` locks another file, beside the folder, and does not wait.
    """
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def read_config(folder: Path) -> Config | None:
    """Read the cloud's settings; return None if the folder has no cloud.

    Raises:
        LocalCloudError: ``folder`` is not a folder.
        DamagedError: ``cloud.json`` is damaged, or it is missing although the cloud's keeper still runs.
    """
    path = folder / CONFIG
    if folder.exists() and not folder.is_dir():
        raise LocalCloudError(f"{folder}: this is not a folder: use another --folder")
    try:
        return codec.decode(path.read_bytes(), Config)
    except FileNotFoundError:
        if read_pid(folder / KEEPER) is None:
            return None
        damage = "the file is missing, but the keeper of its cloud still runs"
    except msgspec.DecodeError as error:
        damage = str(error)
    raise DamagedError(f"{path}: {damage}; {_end_of(folder)}, and start again")


def write_config(folder: Path, config: Config) -> None:
    """Write the settings atomically."""
    temporary = folder / f"{CONFIG}.new"
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(config)))
    temporary.replace(folder / CONFIG)


def count_resources(folder: Path) -> tuple[int, int]:
    """Return the number of VMs, and the number of disks and snapshots, in the cloud's database.

    Raises:
        LocalCloudError: the database is damaged.
    """
    path = folder / "state.sqlite"
    if not path.exists():
        return 0, 0
    try:
        with closing(Database(path)) as state:
            return state.count("instances"), state.count("disks") + state.count("snapshots")
    except sqlite3.DatabaseError as error:
        raise LocalCloudError(f"{path}: {error}; {_end_of(folder)}") from None


def _end_of(folder: Path) -> str:
    return f"end the cloud: spotkeeper local down --force --folder {shlex.quote(str(folder))}"


def end_keeper(folder: Path) -> None:
    """Kill the keeper. Call it before killing the control plane, which the keeper would restart."""
    _kill(folder / KEEPER)


def end_control_plane(folder: Path) -> int | None:
    """Kill the control plane, and return its pid; None if it was not running."""
    return _kill(folder / PID_FILE)


def _kill(path: Path) -> int | None:
    """Kill a recorded process and wait for its end: until then the next ``up`` takes it for running."""
    pid = read_pid(path)
    if pid is None:
        return None
    with suppress(ProcessLookupError):
        end = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(end, signal.SIGKILL)
            select.select([end], [], [], ENDS_S)
        finally:
            os.close(end)
    return pid


def removal_folder(folder: Path) -> Path:
    """Return the path to which a folder is moved before its removal."""
    return folder.with_name(f".{folder.name}.spotkeeper-removed")


def remove(folder: Path) -> None:
    """Remove the folder.

    The folder is first moved in one step, so that a kill during the removal leaves no partial cloud. The next ``up`` or
    ``down`` removes the rest.
    """
    removed = removal_folder(folder)
    shutil.rmtree(removed, ignore_errors=True)
    with suppress(OSError):  # a mount point cannot be moved
        folder.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def code_digest() -> str:
    """Return the hash of the control plane's code on disk; if it has changed, ``up`` replaces the control plane."""
    found = hashlib.sha256()
    package = ROOT / "spotkeeper"
    for path in sorted(path for part in ("local", "contract") for path in (package / part).rglob("*.py")):
        found.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def running_code(folder: Path) -> str:
    """Return the hash of the running control plane's code; "" if unknown."""
    try:
        return (folder / CODE).read_text()
    except OSError:
        return ""


def marks(folder: Path) -> set[str]:
    """Return the cloud marks that running processes of ``folder`` (an absolute path) have in their environment."""
    found: set[str] = set()
    for pid in procs.living():
        values = procs.environment(pid)
        uid = values.get(procs.CLOUD)
        if uid and (_in_guest(folder, values) or _in_control(folder, pid)):
            found.add(uid)
    return found


def _in_guest(folder: Path, values: dict[str, str]) -> bool:
    """Whether a process with this environment belongs to a VM or to a function."""
    root = values.get("SPOTKEEPER_ROOT", "")
    bucket = values.get("SPOTKEEPER_BUCKET", "") if procs.FUNCTION in values else ""
    return root.startswith(f"{folder / 'vms'}/") or bucket == f"sqlite://{folder / 'bucket.sqlite'}"


def _in_control(folder: Path, pid: int) -> bool:
    words = procs.arguments(pid)
    return words[-1:] == [str(folder)] and any(module in words for module in _MODULES)
