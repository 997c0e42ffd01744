"""The agent's end of the launcher's socket, and how helpers are started so that they outlive the agent.

The launcher (``launcher/server.py``) belongs to the node, not to the agent: an agent
that was killed finds it again by its socket. Where systemd runs, launcher and saver are the
jobs' unit's (``jobhost.py``); elsewhere each is a session of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import shutil
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

from spotkeeper.spec import codec
from spotkeeper.vm import jobhost
from spotkeeper.vm.events import ChildEnded, LauncherLost, LauncherUp
from spotkeeper.vm.jobhost import Process
from spotkeeper.vm.launcher import pyenv
from spotkeeper.vm.launcher.output import tail
from spotkeeper.vm.launcher.process import REAP_S
from spotkeeper.vm.launcher.server import SOCKET
from spotkeeper.vm.log import Log

KEY = "SPOTKEEPER_LAUNCHER_KEY"  # what the launcher was started for; another key needs another launcher
WARM_S = 180.0  # real; importing torch from a fresh disk on a busy machine
BUILD_S = 3600.0  # real; making the job's environment, gigabytes of wheels among it
ANSWER_S = 5.0  # real
RETRY_S = 0.05  # real
GUARD_S = REAP_S + 2.0  # real; the guard gives up on a process that does not end
LOG = "launcher.log"
SAVER_SOCKET = "saver.sock"

# The agent's own: the job must not see its path, nor speak to systemd in its name.
_NOT_FOR_JOBS = (
    *("PYTHONPATH", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "INVOCATION_ID"),
    *("JOURNAL_STREAM", "SYSTEMD_EXEC_PID", "RUNTIME_DIRECTORY", "STATE_DIRECTORY", "SPOTKEEPER_UNITS"),
)


class LaunchError(Exception):
    """The launcher refused, or did not answer."""


@dataclass(frozen=True)
class Wants:
    """An environment of the job's own (``launcher/pyenv.py``). ``home``: where it is made without the rank's disk."""

    source: Path
    file: str
    contents: str  # a hash
    home: Path


@dataclass(frozen=True)
class Kind:
    """Which launcher a job needs. The whole environment counts: OpenMP and others read theirs at import."""

    mode: str  # "zygote" or "exec"
    python: str
    env: tuple[tuple[str, str], ...]
    wants: Wants | None = None  # None: that Python has all the job needs
    warm: tuple[str, ...] = ()  # modules that a zygote imports beside its own

    def key(self) -> str:
        wants = self.wants.contents if self.wants else ""
        return hashlib.sha256(repr((self.mode, self.python, self.env, wants, self.warm)).encode()).hexdigest()[:16]


class _Run(Struct, frozen=True):
    gen: int
    pid: int
    code: int | None = None


class _Line(Struct, frozen=True):
    """Any line the launcher sends: an answer (``ok``) or an event."""

    ok: bool | None = None
    error: str = ""
    pid: int = 0
    guard: int = 0
    mode: str = ""
    key: str = ""
    home: str = ""
    memory_mb: float | None = None
    run: _Run | None = None
    event: str = ""
    gen: int = 0
    code: int = 0
    left: int = 0


Posted = LauncherUp | LauncherLost | ChildEnded


class Launcher:
    """One launcher, started and reached by a thread of its own; commands are for the loop's thread."""

    def __init__(self, folder: Path, job_path: Path, post: Callable[[Posted], None], log: Log) -> None:
        self._folder = folder
        self._job_path = job_path
        self._post = post
        self._log = log
        self._socket: socket.socket | None = None
        self._answers: list[_Line] = []
        self._answered = threading.Condition()
        self._process: Process | None = None  # the guard, as started here
        self._guard: int | None = None  # a descriptor of the guard
        self._renewing = False
        self.pid = 0
        self.home = ""  # the folder that the last one was imported from

    @property
    def up(self) -> bool:
        return self._socket is not None

    @property
    def stale(self) -> bool:
        """Whether it was started by an agent of another bundle, whose library the next generation shall not use."""
        return self.up and self.home != str(self._job_path.resolve())

    @property
    def building(self) -> bool:
        """Whether the job's environment is being made, which may take minutes."""
        return (self._folder / pyenv.BUILDING).exists()

    @property
    def gone(self) -> bool:
        """Whether nothing is left of the last one, nor of what it ran."""
        return self.pid == 0 and (self._process is None or self._process.poll() is not None)

    def begin(self, kind: Kind) -> None:
        """Find or start a launcher of this kind. :class:`LauncherUp` follows, and :class:`LauncherLost` at its end.

        To be called again only after a :class:`LauncherLost`.
        """
        threading.Thread(target=self._live, args=(kind,), name="launcher", daemon=True).start()

    def start(self, gen: int, args: list[str], env: Mapping[str, str], cwd: Path, log: Path) -> None:
        """Start torchrun for a generation.

        Raises:
            LaunchError: something still runs, or the launcher is gone.
        """
        self._ask({"op": "start", "gen": gen, "args": args, "env": dict(env), "cwd": str(cwd), "log": str(log)})

    def signal(self, gen: int, number: int) -> None:
        """To torchrun. Raises LaunchError where that generation does not run."""
        self._ask({"op": "signal", "gen": gen, "signal": number})

    def kill(self, gen: int) -> None:
        """SIGKILL to all of a generation. Raises LaunchError where it does not run."""
        self._ask({"op": "kill", "gen": gen})

    def stacks(self, gen: int) -> None:
        """Have its processes' stacks written into its run folder, soon. Raises LaunchError where it does not run."""
        self._ask({"op": "stacks", "gen": gen})

    def renew(self) -> None:
        """Another launcher of the same kind in its place, which must run nothing; :class:`LauncherUp` follows."""
        self._renewing, self._socket = True, None
        self.quit()

    def quit(self) -> None:
        """End the launcher, and with it what it runs; also one that is still coming up. Then it is ``gone``."""
        if self.pid:
            jobhost.send_signal(self.pid, signal.SIGKILL)
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()  # never SIGKILL: it has yet to end what its launcher leaves

    def _ask(self, message: dict[str, object]) -> _Line:
        sock = self._socket
        if sock is None:
            raise LaunchError("no launcher is up")
        with self._answered:
            self._answers.clear()
            try:
                sock.sendall(json.dumps(message).encode() + b"\n")
            except OSError as error:
                raise LaunchError(f"launcher: {error}") from None
            if not self._answered.wait_for(lambda: self._answers, ANSWER_S):
                raise LaunchError("launcher: no answer")
            answer = self._answers.pop()
        if not answer.ok:
            raise LaunchError(f"launcher: {answer.error}")
        return answer

    # The rest runs in the launcher's thread.

    def _last_words(self) -> str:
        return tail(self._folder / LOG, 4096).decode(errors="replace")

    def _live(self, kind: Kind) -> None:
        reason = "it ended"
        try:
            sock = self._connect(kind)
        except LaunchError as error:
            self._post(LauncherLost(str(error), self._last_words()))
            return
        try:
            self._read(sock)
        except OSError as error:
            reason = str(error)
        self._socket = None
        sock.close()
        self._await_guard()
        self.pid = 0
        if self._renewing:
            self._renewing = False
            self.begin(kind)
        else:
            self._post(LauncherLost(reason, self._last_words()))

    def _connect(self, kind: Kind) -> socket.socket:
        sock = self._try_connect()
        if sock is not None and (status := self._greet(sock, kind)):
            return self._welcome(sock, status)
        self._process = process = self._spawn(kind)
        until, latest = time.monotonic() + WARM_S, time.monotonic() + BUILD_S
        while time.monotonic() < until:
            if self.building:
                until = min(time.monotonic() + WARM_S, latest)
            sock = self._try_connect()
            if sock is not None and (status := self._greet(sock, kind)):
                return self._welcome(sock, status)
            if code := process.poll():
                raise LaunchError(f"the launcher ended with {code} before it was ready")
            if code == 0:  # another one holds the folder: it is coming up, or was killed and is not quite gone
                self._process = process = self._spawn(kind)
            time.sleep(RETRY_S)
        process.terminate()
        limit = f"{BUILD_S:.0f} s, with its environment" if time.monotonic() > latest else f"{WARM_S:.0f} s"
        raise LaunchError(f"the launcher was not ready after {limit}")

    def _try_connect(self) -> socket.socket | None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        folder = os.open(self._folder, os.O_PATH | os.O_DIRECTORY)
        try:
            sock.connect(f"/proc/self/fd/{folder}/{SOCKET}")  # as it is bound: a path may be too long
            return sock
        except OSError:
            sock.close()
            return None
        finally:
            os.close(folder)

    def _greet(self, sock: socket.socket, kind: Kind) -> _Line | None:
        """Its status; a launcher of another kind is ended."""
        sock.settimeout(ANSWER_S)
        try:
            sock.sendall(b'{"op": "status"}\n')
            line = sock.makefile("rb").readline()
            status = codec.decode(line, _Line)
        except (OSError, msgspec.DecodeError):
            sock.close()
            return None
        if status.key == kind.key():
            sock.settimeout(None)
            return status
        self._log("launcher.other", pid=status.pid)
        jobhost.send_signal(status.pid, signal.SIGKILL)
        sock.close()
        return None

    def _welcome(self, sock: socket.socket, status: _Line) -> socket.socket:
        self.pid, self.home = status.pid, status.home
        with contextlib.suppress(OSError):  # it is gone, so the launcher has no parent to wait for
            self._guard = os.pidfd_open(status.guard) if status.guard else None
        self._socket = sock
        self._log("launcher.up", pid=status.pid, mode=status.mode, memory_mb=status.memory_mb)
        run = status.run
        self._post(LauncherUp(run.gen if run else None, run.code if run else None))
        return sock

    def _await_guard(self) -> None:
        """What the launcher ran has ended when its guard has: only then may another generation begin."""
        if self._guard is not None:
            select.select([self._guard], [], [], GUARD_S)
            os.close(self._guard)
            self._guard = None

    def _read(self, sock: socket.socket) -> None:
        for raw in sock.makefile("rb"):
            line = codec.decode(raw, _Line)
            if line.event == "exit":
                self._post(ChildEnded(line.gen, line.code, line.left))
            elif line.ok is not None:
                with self._answered:
                    self._answers.append(line)
                    self._answered.notify()

    def _spawn(self, kind: Kind) -> Process:
        env = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_JOBS}
        env |= dict(kind.env)
        path = str(self._job_path)
        env["PYTHONPATH"] = f"{path}:{env['PYTHONPATH']}" if env.get("PYTHONPATH") else path
        env[KEY] = kind.key()
        env.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # a zygote must never initialise CUDA
        if shutil.which(kind.python, path=env.get("PATH")) is None:
            raise LaunchError(f"cannot start {kind.python}: no such program")
        guard = [sys.executable, "-BIS", str(self._job_path / "spotkeeper/vm/launcher/guard.py"), str(self._folder)]
        command = [*guard, kind.python, "-m", f"spotkeeper.vm.launcher.{kind.mode}", str(self._folder), *kind.warm]
        if (wants := kind.wants) is not None:
            (self._folder / pyenv.BUILDING).unlink(missing_ok=True)
            making = [str(self._job_path / "spotkeeper/vm/launcher/pyenv.py"), str(self._folder)]
            command = [*guard, kind.python, "-B", *making, str(wants.source), wants.file, str(wants.home), kind.mode]
            command += kind.warm
        self._log("launcher.start", mode=kind.mode, python=kind.python)
        try:
            return jobhost.spawn("launcher", command, env, self._folder / LOG)
        except OSError as error:
            raise LaunchError(f"cannot start a launcher: {error.strerror}") from None


def saver_pid(folder: Path) -> int | None:
    """Who serves the node as its saver, perhaps started by an agent before this one; None: nobody."""
    handle = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(f"/proc/self/fd/{handle}/{SAVER_SOCKET}")
            peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pid: int = struct.unpack("3i", peer)[0]
            return pid
    except OSError:
        return None
    finally:
        os.close(handle)


def start_saver(folder: Path, job_path: Path) -> Process:
    """Start the node's saver; one that finds another serving ends by itself."""
    program = job_path / "spotkeeper/train/saver.py"
    command = [sys.executable, "-S", str(program), "--socket", str(folder / SAVER_SOCKET)]
    env = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_JOBS}
    return jobhost.spawn("saver", command, env, folder / "saver.log")
