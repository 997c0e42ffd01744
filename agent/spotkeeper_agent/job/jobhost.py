"""Client of the jobs' unit (``launcher/host.py``): starts, signals and kills processes of the job.

Under systemd the job's processes belong to another user, so the unit acts for the agent. Elsewhere (the one-machine
cloud) the agent starts these processes itself, each in a session of its own.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import json
import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
from msgspec import Struct

from spotkeeper.contract import codec
from spotkeeper.train.core import beneath
from spotkeeper_agent.host import systemd
from spotkeeper_agent.host.roothelper import RefusedError
from spotkeeper_agent.host.systemd import has_units
from spotkeeper_agent.launcher import process
from spotkeeper_agent.launcher.host import SOCKET

HOST = Path("/run/spotkeeper-job") / SOCKET  # made by systemd, in a folder that root owns
STATE = Path("/var/lib/spotkeeper-job")  # owned by the jobs' user, on the boot disk
GROUP = "spotkeeper-job"  # the only group of the jobs' user; it owns only shared files
ANSWER_S = 10.0  # real
LINE_BYTES = 64 << 10
BEGIN_S = 20.0  # real; the unit may restart meanwhile
RETRY_S = 0.1  # real


class HostError(OSError):
    """The jobs' unit refused a request or does not answer."""


class SilentError(HostError):
    """The unit's process exists but does not answer."""


class Process(Protocol):
    """The part of :class:`subprocess.Popen` that the agent uses; the process may belong to another user."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def terminate(self) -> None: ...


_Pid = Annotated[int, msgspec.Meta(ge=0, le=1 << 22)]  # the kernel's maximum


class _UnitReply(Struct, frozen=True):
    ok: bool = False
    error: str = ""
    pid: _Pid = 0
    count: _Pid = 0
    code: Annotated[int, msgspec.Meta(ge=0, le=255)] | None = None


class Hosted:
    """A program that the jobs' unit runs. The unit reports its end on ``sock``, which carried the start request."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self.pid = pid
        self._sock = sock
        self._text = b""
        self._code: int | None = None
        sock.setblocking(False)

    def poll(self) -> int | None:
        """Return the exit code, as a shell shows it; 137 if the unit itself ended; None while the program runs."""
        if self._code is None:
            try:
                data = self._sock.recv(4096)
            except BlockingIOError:
                return None
            except OSError:
                data = b""
            self._text += data
            if not data or len(self._text) > LINE_BYTES:
                self._code = 128 + signal.SIGKILL
            elif b"\n" in self._text:
                self._code = _code(self._text.partition(b"\n")[0])
            if self._code is not None:
                self._sock.close()
        return self._code

    def terminate(self) -> None:
        send_signal(self.pid, signal.SIGTERM)


def give(path: Path) -> None:
    """Give a file to the jobs' group without changing the file's mode."""
    if has_units():
        os.chown(path, -1, grp.getgrnam(GROUP).gr_gid, follow_symlinks=False)


def share(path: Path) -> None:
    """Let the jobs' user write this file or folder; call it only if that user cannot write the parent folder."""
    if has_units():
        give(path)
        if not path.is_symlink():
            path.chmod(0o775 if path.is_dir() or path.stat().st_mode & 0o100 else 0o664)


def home(state: Path, job: str) -> Path:
    """Return the folder on the boot disk for the job's own files. Without systemd units all jobs share ``state``."""
    return STATE / job if has_units() else state


def begin(job: str) -> None:
    """Have the jobs' unit serve this job ("": no job) and remove all that another job left; this can take seconds.

    Raises:
        OSError: the unit does not answer.
    """
    until = time.monotonic() + BEGIN_S
    while has_units():
        try:
            _once({"op": "begin", "job": job})
        except OSError:  # the unit restarts, perhaps because of this request
            if time.monotonic() > until:
                _restart()
                raise
            time.sleep(RETRY_S)
        else:
            return


def spawn(name: str, command: list[str], env: dict[str, str], log: Path) -> Process:
    """Start a program as the jobs' user; it outlives the agent.

    Raises:
        OSError: the program cannot be started.
    """
    if has_units():
        sock = _connect()
        try:
            with _restarted_if_silent():
                line = _ask(sock, {"op": "start", "name": name, "argv": command, "env": env, "log": str(log)})
        except OSError:
            sock.close()
            raise
        return Hosted(sock, line.pid)
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(beneath.open_log(log.parent, log.name), "ab") as out:  # noqa: PTH123 - a descriptor
        return subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )


def send_signal(pid: int, number: int) -> None:
    """Signal a program of the jobs' user; do nothing if the program has ended.

    Pids up to 1 are ignored, because for kill(2) 0 means the caller's process group, and -1 all processes.
    """
    if pid <= 1:
        return
    try:
        if has_units():
            with _restarted_if_silent():
                _once({"op": "signal", "pid": pid, "signal": int(number)})
        else:
            os.kill(pid, number)
    except OSError:
        return


def sweep(folder: Path, keep: set[int]) -> int:
    """Kill all processes that a generation left behind except ``keep``; return how many were found.

    They are found by their cgroup; without systemd units, by an environment variable (the mark) or a resource limit
    (the tag) that they inherit from the launcher (``launcher/process.py``).
    """
    if not has_units():
        return process.sweep(folder, keep)
    try:
        with _restarted_if_silent():
            return _once({"op": "sweep", "folder": str(folder), "keep": sorted(keep)}).count
    except OSError:
        return 0  # the unit restarts, which has killed all of them


@contextlib.contextmanager
def _restarted_if_silent() -> Iterator[None]:
    """Have root restart the unit if the unit's process does not answer: a job may have stopped that process."""
    try:
        yield
    except SilentError:
        _restart()
        raise


def _restart() -> None:
    with contextlib.suppress(RefusedError):  # the next call finds the unit silent and retries
        systemd.request_root("restart-jobs")


def _once(message: dict[str, object]) -> _UnitReply:
    with _connect() as sock:
        return _ask(sock, message)


def _connect() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(ANSWER_S)
    try:
        sock.connect(str(HOST))
    except OSError as error:
        sock.close()
        raise HostError(error.errno, f"the jobs' unit does not answer: {error.strerror}") from None
    _, owner, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if owner not in (0, os.geteuid()):  # root if systemd listens; the agent's user if there is no unit
        sock.close()
        raise HostError(0, f"{HOST}: user {owner} listens on it, not systemd; reboot this machine to renew its units")
    return sock


def _code(line: bytes) -> int:
    try:
        return codec.decode(line, _UnitReply).code or 0
    except msgspec.DecodeError:
        return 128 + signal.SIGKILL


def _ask(sock: socket.socket, message: dict[str, object]) -> _UnitReply:
    """Send one request and return its answer, bounded in time and length.

    Raises:
        SilentError: the unit does not answer in time.
        HostError: the unit restarts, refuses the request, or sends an invalid answer.
    """
    try:
        line = codec.decode(_exchange(sock, message), _UnitReply)
    except TimeoutError:
        raise SilentError(errno.ETIMEDOUT, f"the jobs' unit: no answer in {ANSWER_S:g} s") from None
    except OSError as error:
        raise HostError(error.errno, f"the jobs' unit: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise HostError(0, f"the jobs' unit: {error}") from None
    if not line.ok:
        raise HostError(0, f"the jobs' unit: {line.error}")
    return line


def _exchange(sock: socket.socket, message: dict[str, object]) -> bytes:
    until = time.monotonic() + ANSWER_S
    sock.sendall(json.dumps(message).encode() + b"\n")
    text = b""
    while not text.endswith(b"\n") and (data := sock.recv(1)):  # the report of the program's end may follow
        text += data
        if time.monotonic() > until:
            raise TimeoutError
        if len(text) > LINE_BYTES:
            raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
    return text
