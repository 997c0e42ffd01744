"""The launcher's socket: starts one torchrun at a time and leaves no process of a generation behind.

A launcher outlives the agent that started it: a restarted agent connects again and requests ``status``. Both sides send
one JSON object per line:

    -> {"op": "status"}
    <- {"ok": true, "pid": 7, "guard": 6, "mode": "zygote", "key": "9f2c", "home": "...", "memory_mb": 312.5,
        "run": {"gen": 3, "pid": 9, "code": null}}
    -> {"op": "start", "gen": 4, "args": [...], "env": {...}, "cwd": "...", "log": "..."}
    <- {"ok": true, "pid": 12}                  or {"ok": false, "error": "generation 3 still runs"}
    -> {"op": "signal", "gen": 4, "signal": 15} signal torchrun
    -> {"op": "kill", "gen": 4}                 send SIGKILL to all processes of the generation
    -> {"op": "stacks", "gen": 4}               write its processes' stack traces into the run folder (``stacks.py``)
    <- {"event": "exit", "gen": 4, "code": 0, "left": 0}     all its processes have ended, but for ``left``

In the answer to ``status``, ``guard`` is the pid of the launcher's parent (``guard.py``), 0 without one; ``key`` a hash
of what the agent required of this launcher, such as its mode and Python; ``home`` the folder that it was imported from;
and ``run`` the newest generation or null, with torchrun's pid and exit code (null while torchrun runs).

The launcher uses no network, no CUDA device and no disk besides the run folder.
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

from spotkeeper.train.core import beneath
from spotkeeper_agent.launcher import stacks
from spotkeeper_agent.launcher.image import CONTAINER
from spotkeeper_agent.launcher.lines import Lines, Message
from spotkeeper_agent.launcher.process import GUARD, become_subreaper, kill_children, own_cgroup, reap_dead, shell_code

SOCKET = "launcher.sock"
LOCK = "launcher.lock"
_HOME = str(Path(__file__).resolve().parents[2])  # the folder on the job's path that holds this package


@dataclass(frozen=True)
class Start:
    """A request to start a generation. ``env`` is added to the launcher's own environment."""

    gen: int
    args: list[str]
    env: dict[str, str]
    cwd: str
    log: str


@dataclass
class LaunchedRun:
    """The newest generation. ``folder``: its run folder; ``code``: torchrun's exit code, None while it runs."""

    gen: int
    pid: int
    folder: str
    code: int | None = None


@dataclass
class Server:
    """Serves the agent. ``spawn`` starts torchrun for a request and returns its pid; ``folder`` contains the socket."""

    folder: Path
    mode: str
    spawn: Callable[[Start, Server], int]
    run: LaunchedRun | None = None
    _lines: Lines = field(init=False)
    _lock: int = field(init=False)

    def serve(self) -> None:
        """Serve until killed; return at once if another launcher has locked the folder."""
        become_subreaper()
        lock = self._lock = self._open_lock()
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{self.folder}: another launcher serves here", file=sys.stderr)
            return
        self._lines = Lines(self._listen(), lambda _, line: self._answer(line), self._reap, self._admits)
        self._lines.open()
        self._lines.serve()

    def _open_lock(self) -> int:
        """Open the lock file; a folder, link or other thing that an earlier job left under its name is removed."""
        flags = os.O_RDWR | os.O_CREAT
        try:
            return beneath.open_file(self.folder, LOCK, flags, 0o600)
        except OSError:
            beneath.make_way(self.folder, LOCK)
            return beneath.open_file(self.folder, LOCK, flags, 0o600)

    def leave_in_child(self) -> None:
        """Close this server's sockets, lock and handlers in a forked child."""
        self._lines.leave_in_child()
        os.close(self._lock)

    def _listen(self) -> socket.socket:
        """Make the socket. Its address names the folder by a descriptor, because an address has at most 108 bytes."""
        folder = os.open(self.folder, os.O_PATH | os.O_DIRECTORY)
        try:
            beneath.make_way(self.folder, SOCKET)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            before = os.umask(0o117)
            listener.bind(f"/proc/self/fd/{folder}/{SOCKET}")
            os.umask(before)
            listener.listen(4)
            return listener
        finally:
            os.close(folder)

    def _admits(self, client: socket.socket) -> bool:
        """Whether to serve a client: only root, this user, and the folder's owner (under systemd, the agent)."""
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
        key = os.environ.get("SPOTKEEPER_LAUNCHER_KEY", "")  # LauncherKind.key()
        guard = os.getppid() if os.environ.get(GUARD) == str(os.getppid()) else 0
        about: Message = {"pid": os.getpid(), "guard": guard, "mode": self.mode, "key": key, "home": _HOME}
        return {"ok": True, **about, "memory_mb": memory_mb(), "run": run}

    def _start(self, start: Start) -> Message:
        if self.run is not None and self.run.code is None:
            return {"ok": False, "error": f"generation {self.run.gen} still runs"}
        try:
            self.run = LaunchedRun(start.gen, self.spawn(start, self), str(Path(start.log).parent))
        except OSError as error:
            return {"ok": False, "error": f"cannot start torchrun: {error}"}
        return {"ok": True, "pid": self.run.pid}

    def _signal(self, gen: int, number: int) -> Message:
        if self.run is None or self.run.gen != gen or self.run.code is not None:
            return {"ok": False, "error": f"generation {gen} does not run"}
        os.kill(self.run.pid, number)  # not reaped yet, so no other process has its pid
        return {"ok": True}

    def _kill(self, gen: int) -> Message:
        """Kill torchrun and the generation's cgroup, if it has one. ``_reap`` then kills all other children."""
        cgroup = Cgroup.own()
        if cgroup is not None:
            cgroup.kill(gen)
        return self._signal(gen, signal.SIGKILL)

    def _stacks(self, gen: int) -> Message:
        """Start a separate process that collects the stack traces, because a hung worker may take long to answer."""
        run = self.run
        if run is None or run.gen != gen or run.code is not None:
            return {"ok": False, "error": f"generation {gen} does not run"}
        # podman starts a container's processes as the launcher's children, beside itself.
        root = run.pid if CONTAINER not in os.environ else os.getpid()
        words = [sys.executable, "-BIS", stacks.__file__, str(root), run.folder]
        try:
            return {"ok": True, "pid": os.posix_spawn(sys.executable, words, os.environ)}
        except OSError as error:
            return {"ok": False, "error": f"cannot collect stack traces: {error}"}

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
        self._lines.send_all({"event": "exit", "gen": run.gen, "code": run.code, "left": left})


def memory_mb() -> float | None:
    """Return this process's PSS in MB: a page shared by n processes counts as 1/n."""
    with contextlib.suppress(OSError):  # a kernel before 4.14
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return round(int(line.split()[1]) / 1024, 1)
    return None


@dataclass(frozen=True)
class Cgroup:
    """The launcher's cgroup, which no process can leave. Only a launcher in the jobs' systemd unit has one."""

    path: Path

    @classmethod
    def own(cls) -> Cgroup | None:
        path = own_cgroup() if os.environ.get("SPOTKEEPER_DELEGATED") else None
        return None if path is None else cls(path)

    def enter(self, gen: int) -> None:
        """Move the calling process into this generation's cgroup, which lies below the launcher's cgroup."""
        folder = self.path / f"gen-{gen}"
        folder.mkdir(exist_ok=True)
        (folder / "cgroup.procs").write_text("0")

    def kill(self, gen: int) -> None:
        with contextlib.suppress(OSError):  # the generation has no cgroup, or the kernel is older than 5.14
            (self.path / f"gen-{gen}" / "cgroup.kill").write_text("1")

    def remove(self, gen: int) -> None:
        with contextlib.suppress(OSError):
            (self.path / f"gen-{gen}").rmdir()
