"""The jobs' unit: starts launchers and savers as the jobs' user, for an agent that is somebody else.

Under systemd the agent has no right to start, signal or see the job's processes; this process, of the jobs' user,
does it for it. It outlives every agent, and knows nothing of jobs: programs, signals, marks. Each program gets a
sub-group of the unit's delegated cgroup, in which the launcher makes one per generation, so that each can be killed
alone. One JSON object a line, both ways, through a unix socket that the unit's group may open:

    -> {"op": "start", "name": "launcher", "argv": [...], "env": {...}, "log": "..."}
    <- {"ok": true, "pid": 12}     and, on this connection, when it has ended:  {"code": 0}
    -> {"op": "signal", "pid": 12, "signal": 15}         <- {"ok": true}
    -> {"op": "sweep", "folder": "...", "keep": [7]}     <- {"ok": true, "count": 0}

    python -IBS host.py FOLDER

Standard library only (10 MB resident).
"""

from __future__ import annotations

import sys

if not __package__:  # run as a file, with nothing on the path but the standard library
    sys.path.insert(0, __file__.rsplit("/", 4)[0])

import contextlib
import json
import os
import signal
import socket
from dataclasses import dataclass, field
from pathlib import Path

from spotkeeper.vm.launcher.lines import Lines, Message
from spotkeeper.vm.launcher.process import reap_dead, shell_code, sweep

SOCKET = "host.sock"
DELEGATED = "SPOTKEEPER_DELEGATED"  # tells the launcher that the cgroup it is in is its own


OWN = ("HOME", "USER", "LOGNAME", "SHELL")  # of the jobs' user, not of the agent, whose environment it sends


@dataclass
class Host:
    """``folder`` holds the socket; ``cgroup`` is the unit's, None where it has none of its own."""

    folder: Path
    cgroup: Path | None
    _began: int = 0
    _owners: dict[int, socket.socket] = field(default_factory=dict)  # pid -> who is to be told of its end
    _groups: dict[int, Path] = field(default_factory=dict)
    _lines: Lines = field(init=False)

    def serve(self) -> None:
        """Until it is ended."""
        self._lines = Lines(self._listen(), self._answer, self._reap)
        self._lines.open()
        _ready()
        self._lines.serve()

    def _listen(self) -> socket.socket:
        path = self.folder / SOCKET
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o117)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(8)
        return listener

    def _answer(self, client: socket.socket, line: bytes) -> Message:
        try:
            message = json.loads(line)
            op = message.pop("op")
            if op == "start":
                pid = self._start(**message)
                self._owners[pid] = client
                return {"ok": True, "pid": pid}
            if op == "signal":
                pid = int(message["pid"])
                if pid <= 1:
                    raise ValueError(f"{pid}: is no program's pid")  # kill(2) would take it for a group, or for all
                os.kill(pid, int(message["signal"]))
                return {"ok": True}
            if op == "sweep":
                keep = {os.getpid(), *map(int, message["keep"])}
                return {"ok": True, "count": sweep(Path(message["folder"]), keep)}
            return {"ok": False, "error": f"unknown op {op!r}"}
        except (ArithmeticError, ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            return {"ok": False, "error": f"{type(error).__name__}: {error}"}

    def _start(self, name: str, argv: list[str], env: dict[str, str], log: str) -> int:
        self._began += 1
        group = self._group(f"{name}-{self._began}")
        pid = os.fork()  # one thread, so Python code behind it is safe
        if pid:
            if group is not None:
                self._groups[pid] = group
            return pid
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            if group is not None:
                (group / "cgroup.procs").write_text("0")
                env = env | {DELEGATED: "1"}
            env = env | {name: os.environ[name] for name in OWN if name in os.environ}
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o664)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.execvpe(argv[0], argv, env)  # noqa: S606 - an argv; all of our own descriptors close on exec
        except (OSError, ValueError) as error:
            with contextlib.suppress(OSError):
                os.write(2, f"{argv[0]}: {error}\n".encode())
        finally:
            os._exit(127)

    def _group(self, name: str) -> Path | None:
        if self.cgroup is None:
            return None
        path = self.cgroup / name
        path.mkdir(exist_ok=True)
        return path

    def _reap(self) -> None:
        for pid, code in reap_dead().items():
            client, group = self._owners.pop(pid, None), self._groups.pop(pid, None)
            if group is not None:
                _remove(group)
            if client is not None:
                self._lines.send(client, {"code": shell_code(code)})


def _remove(group: Path) -> None:
    """Whatever is left in it ends: its program has."""
    with contextlib.suppress(OSError):
        (group / "cgroup.kill").write_text("1")
    with contextlib.suppress(OSError):
        for child in sorted(group.iterdir(), reverse=True):
            if child.is_dir():
                child.rmdir()
        group.rmdir()


def own_cgroup() -> Path | None:
    """The unit's delegated cgroup, None where there is none that this process may divide."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::") and line[3:].strip() != "/":
            path = Path("/sys/fs/cgroup") / line[3:].strip().lstrip("/")
            return path if os.access(path / "cgroup.procs", os.W_OK) and os.access(path, os.W_OK) else None
    return None


def _ready() -> None:
    address = os.environ.pop("NOTIFY_SOCKET", "")
    if address:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(b"READY=1", "\0" + address[1:] if address[0] == "@" else address)


if __name__ == "__main__":
    Host(Path(sys.argv[1]), own_cgroup()).serve()
