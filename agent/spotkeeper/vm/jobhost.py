"""The agent's end of the jobs' unit (``launcher/host.py``), and the same without systemd: a session of its own.

Programs, signals and marks of the job's side. On a machine with systemd the job's processes are another user's, so
all of it is asked for; elsewhere (the one-machine cloud) they are ours.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from spotkeeper.spec import codec
from spotkeeper.vm.launcher import process
from spotkeeper.vm.launcher.host import SOCKET
from spotkeeper.vm.power import has_units

HOST = Path("/run/spotkeeper-job") / SOCKET
STATE = Path("/var/lib/spotkeeper-job")  # the jobs' user's own, on the boot disk
ANSWER_S = 10.0  # real


class HostError(OSError):
    """The jobs' unit refused, or does not answer."""


class Process(Protocol):
    """What of :class:`subprocess.Popen` is used: it may be another user's."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def terminate(self) -> None: ...


class _Line(Struct, frozen=True):
    ok: bool = False
    error: str = ""
    pid: int = 0
    count: int = 0
    code: int | None = None


class Hosted:
    """A program that the jobs' unit runs. The connection over which it was started tells its end."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self.pid = pid
        self._sock = sock
        self._text = b""
        self._code: int | None = None
        sock.setblocking(False)

    def poll(self) -> int | None:
        """Its exit code, as a shell shows it; 137 where the unit itself has gone. None: it runs."""
        if self._code is None:
            try:
                data = self._sock.recv(4096)
            except BlockingIOError:
                return None
            except OSError:
                data = b""
            self._text += data
            if not data:
                self._code = 128 + signal.SIGKILL
            elif b"\n" in self._text:
                self._code = codec.decode(self._text.partition(b"\n")[0], _Line).code or 0
            if self._code is not None:
                self._sock.close()
        return self._code

    def terminate(self) -> None:
        send_signal(self.pid, signal.SIGTERM)


def hosted() -> bool:
    """Whether the job's processes are another user's."""
    return has_units()


def spawn(name: str, command: list[str], env: dict[str, str], log: Path) -> Process:
    """Start a program that outlives the agent.

    Raises:
        OSError: it cannot be started.
    """
    if hosted():
        sock = _connect()
        try:
            line = _ask(sock, {"op": "start", "name": name, "argv": command, "env": env, "log": str(log)})
        except OSError:
            sock.close()
            raise
        return Hosted(sock, line.pid)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        return subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )


def send_signal(pid: int, number: int) -> None:
    """To a program of the job's side; one that is gone already is not missed."""
    try:
        if hosted():
            _once({"op": "signal", "pid": pid, "signal": int(number)})
        else:
            os.kill(pid, number)
    except OSError:
        return


def sweep(folder: Path, keep: set[int]) -> int:
    """SIGKILL to every process that bears this node's mark, but for ``keep``. Returns how many there were."""
    if not hosted():
        return process.sweep(folder, keep)
    try:
        return _once({"op": "sweep", "folder": str(folder), "keep": sorted(keep)}).count
    except OSError:
        return 0  # the unit is being restarted, which has ended all of them


def _once(message: dict[str, object]) -> _Line:
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
    return sock


def _ask(sock: socket.socket, message: dict[str, object]) -> _Line:
    sock.sendall(json.dumps(message).encode() + b"\n")
    text = b""
    while not text.endswith(b"\n") and (data := sock.recv(1)):  # what comes behind the answer is the program's end
        text += data
    try:
        line = codec.decode(text, _Line)
    except msgspec.DecodeError as error:
        raise HostError(0, f"the jobs' unit: {error}") from None
    if not line.ok:
        raise HostError(0, f"the jobs' unit: {line.error}")
    return line
