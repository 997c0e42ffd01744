"""The launcher's side of its socket: starts one torchrun at a time and leaves nothing of it behind.

A launcher outlives the agent that started it: a restarted agent connects again and
asks for ``status``. One JSON object a line, both ways:

    -> {"op": "status"}
    <- {"ok": true, "pid": 7, "guard": 6, "mode": "zygote", "key": "9f2c", "home": "...", "memory_mb": 312.5,
        "run": {"gen": 3, "pid": 9, "code": null}}
    -> {"op": "start", "gen": 4, "args": [...], "env": {...}, "cwd": "...", "log": "..."}
    <- {"ok": true, "pid": 12}                  or {"ok": false, "error": "generation 3 still runs"}
    -> {"op": "signal", "gen": 4, "signal": 15} to torchrun
    -> {"op": "kill", "gen": 4}                 SIGKILL to everything of that generation
    -> {"op": "stacks", "gen": 4}               its processes' stacks into the run folder, soon (``stacks.py``)
    <- {"event": "exit", "gen": 4, "code": 0, "left": 0}     once all of it is gone

It may not touch the network, a disk beyond the run folder, or a CUDA device.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from spotkeeper.vm.launcher import stacks
from spotkeeper.vm.launcher.lines import Lines, Message
from spotkeeper.vm.launcher.process import GUARD, become_subreaper, kill_children, reap_dead, shell_code

SOCKET = "launcher.sock"
LOCK = "launcher.lock"
_HOME = str(Path(__file__).resolve().parents[3])  # the folder on the job's path that this was imported from


@dataclass(frozen=True)
class Start:
    """What to run. ``env`` is laid over the launcher's own environment."""

    gen: int
    args: list[str]
    env: dict[str, str]
    cwd: str
    log: str


@dataclass
class Run:
    gen: int
    pid: int
    folder: str  # of the run
    code: int | None = None  # None: it runs


@dataclass
class Server:
    """``spawn`` starts torchrun for a request and returns its pid; ``folder`` holds the socket."""

    folder: Path
    mode: str
    spawn: Callable[[Start, Server], int]
    run: Run | None = None
    _lines: Lines = field(init=False)
    _lock: int = field(init=False)

    def serve(self) -> None:
        """Serve until killed; return at once where another launcher holds the folder."""
        become_subreaper()
        lock = self._lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{self.folder}: another launcher serves here", file=sys.stderr)
            return
        self._lines = Lines(self._listen(), lambda _, line: self._answer(line), self._reap, self._admits)
        self._lines.open()
        self._lines.serve()

    def leave_in_child(self) -> None:
        """In a forked child: drop the sockets, the lock and the handlers of this server."""
        self._lines.leave_in_child()
        os.close(self._lock)

    def _listen(self) -> socket.socket:
        """Bind through a folder's descriptor: a unix socket's path ends at 108 bytes, ours may be longer."""
        folder = os.open(self.folder, os.O_PATH | os.O_DIRECTORY)
        try:
            (self.folder / SOCKET).unlink(missing_ok=True)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            before = os.umask(0o117)
            listener.bind(f"/proc/self/fd/{folder}/{SOCKET}")
            os.umask(before)
            listener.listen(4)
            return listener
        finally:
            os.close(folder)

    def _admits(self, client: socket.socket) -> bool:
        """The agent made the folder; under systemd it is another user than the job."""
        peer = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        return peer[1] in (0, os.geteuid(), self.folder.stat().st_uid)

    def _answer(self, line: bytes) -> Message:  # noqa: PLR0911 - one answer each
        try:
            message = json.loads(line)
            op = message["op"]
            if op == "status":
                return self._status()
            if op == "start":
                del message["op"]
                return self._start(Start(**message))
            if op == "signal":
                return self._signal(int(message["gen"]), int(message["signal"]))
            if op == "kill":
                return self._kill(int(message["gen"]))
            if op == "stacks":
                return self._stacks(int(message["gen"]))
            return {"ok": False, "error": f"unknown op {op!r}"}
        except (ValueError, KeyError, TypeError) as error:
            return {"ok": False, "error": f"{type(error).__name__}: {error}"}

    def _status(self) -> Message:
        run = None if self.run is None else {"gen": self.run.gen, "pid": self.run.pid, "code": self.run.code}
        key = os.environ.get("SPOTKEEPER_LAUNCHER_KEY", "")  # what its agent started it for
        guard = os.getppid() if os.environ.get(GUARD) == str(os.getppid()) else 0
        about: Message = {"pid": os.getpid(), "guard": guard, "mode": self.mode, "key": key, "home": _HOME}
        return {"ok": True, **about, "memory_mb": memory_mb(), "run": run}

    def _start(self, start: Start) -> Message:
        if self.run is not None and self.run.code is None:
            return {"ok": False, "error": f"generation {self.run.gen} still runs"}
        try:
            self.run = Run(start.gen, self.spawn(start, self), str(Path(start.log).parent))
        except OSError as error:
            return {"ok": False, "error": f"cannot start torchrun: {error}"}
        return {"ok": True, "pid": self.run.pid}

    def _signal(self, gen: int, number: int) -> Message:
        if self.run is None or self.run.gen != gen or self.run.code is not None:
            return {"ok": False, "error": f"generation {gen} does not run"}
        os.kill(self.run.pid, number)  # not reaped yet, so the number is still its own
        return {"ok": True}

    def _kill(self, gen: int) -> Message:
        """torchrun first, so that nothing restarts what dies; the rest when it has been reaped."""
        cgroup = Cgroup.own()
        if cgroup is not None:
            cgroup.kill(gen)
        return self._signal(gen, signal.SIGKILL)

    def _stacks(self, gen: int) -> Message:
        """By a process of its own: whoever hangs may take its time to answer."""
        run = self.run
        if run is None or run.gen != gen or run.code is not None:
            return {"ok": False, "error": f"generation {gen} does not run"}
        words = [sys.executable, "-BIS", stacks.__file__, str(run.pid), run.folder]
        try:
            return {"ok": True, "pid": os.posix_spawn(sys.executable, words, os.environ)}
        except OSError as error:
            return {"ok": False, "error": f"cannot look for stacks: {error}"}

    def _reap(self) -> None:
        ended = reap_dead()
        run = self.run
        if run is None or run.code is not None or run.pid not in ended:
            return
        left = kill_children()
        cgroup = Cgroup.own()
        if cgroup is not None:
            cgroup.kill(run.gen)
            cgroup.remove(run.gen)
        run.code = shell_code(ended[run.pid])
        self._lines.tell_all({"event": "exit", "gen": run.gen, "code": run.code, "left": left})


def memory_mb() -> float | None:
    """What this process costs its machine: PSS, in which a page shared with n processes counts as 1/n of one."""
    with contextlib.suppress(OSError):  # a kernel before 4.14
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return round(int(line.split()[1]) / 1024, 1)
    return None


@dataclass(frozen=True)
class Cgroup:
    """The launcher's delegated cgroup, where its unit has one (``SPOTKEEPER_DELEGATED``): nothing escapes it."""

    path: Path

    @classmethod
    def own(cls) -> Cgroup | None:
        if not os.environ.get("SPOTKEEPER_DELEGATED"):
            return None
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                path = Path("/sys/fs/cgroup") / line[3:].lstrip("/")
                return cls(path) if os.access(path, os.W_OK) else None
        return None

    def enter(self, gen: int) -> None:
        """Move the calling process into the sub-cgroup of this generation."""
        folder = self.path / f"gen-{gen}"
        folder.mkdir(exist_ok=True)
        (folder / "cgroup.procs").write_text("0")

    def kill(self, gen: int) -> None:
        with contextlib.suppress(OSError):  # it never had one, or the kernel is older than 5.14
            (self.path / f"gen-{gen}" / "cgroup.kill").write_text("1")

    def remove(self, gen: int) -> None:
        with contextlib.suppress(OSError):
            (self.path / f"gen-{gen}").rmdir()
