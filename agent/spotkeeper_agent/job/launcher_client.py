"""Client of the launcher's socket. Starts launcher and saver so that they outlive the agent.

A restarted agent finds the running launcher (``launcher/server.py``) by its socket. ``jobhost.py`` starts the
processes.
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
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Struct

from spotkeeper.contract import codec
from spotkeeper.train.core import beneath
from spotkeeper_agent.core.events import ChildEnded, LauncherLost, LauncherUp
from spotkeeper_agent.core.log import Log
from spotkeeper_agent.core.settings import JobPath
from spotkeeper_agent.host.systemd import has_units
from spotkeeper_agent.job import jobhost
from spotkeeper_agent.job.failures import tail
from spotkeeper_agent.job.jobhost import Process
from spotkeeper_agent.launcher import pyenv
from spotkeeper_agent.launcher.process import REAP_S
from spotkeeper_agent.launcher.server import SOCKET

KEY = "SPOTKEEPER_LAUNCHER_KEY"  # hash of the launcher's requirements; another key needs another launcher
WARM_S = 180.0  # real; time to import torch from a fresh disk on a busy machine
BUILD_S = 3600.0  # real; time to make the job's environment, with gigabytes of wheels
ANSWER_S = 5.0  # real
LINE_BYTES = 64 << 10
RETRY_S = 0.05  # real
GUARD_S = REAP_S + 2.0  # real; the guard gives up on a process that does not end
LOG = "launcher.log"
SAVER_SOCKET = "saver.sock"

# The agent's own variables: with them a job would import from the agent's path or notify systemd in its name.
_NOT_FOR_JOBS = (
    *("PYTHONPATH", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "INVOCATION_ID"),
    *("JOURNAL_STREAM", "SYSTEMD_EXEC_PID", "RUNTIME_DIRECTORY", "STATE_DIRECTORY", "SPOTKEEPER_UNITS"),
)


class LaunchError(Exception):
    """The launcher refused a request or did not answer."""


@dataclass(frozen=True)
class Requirements:
    """A job's own Python environment (``launcher/pyenv.py``). ``home``: the folder for it while no disk is mounted."""

    source: Path
    file: str
    contents: str  # a hash
    home: Path


@dataclass(frozen=True)
class Image:
    """A job's container image (``launcher/image.py``). ``folders``: they have the same paths in the container.

    ``identity``: the variables of the job's identity, by which the pull logs in.
    """

    reference: str
    python: str
    folders: tuple[Path, ...]
    identity: Mapping[str, str] = field(default_factory=dict, repr=False)  # no part of the launcher's key


@dataclass(frozen=True)
class LauncherKind:
    """The launcher that a job needs. ``env``: the job's variables; a zygote's import of torch reads some of them."""

    mode: str  # "zygote" or "exec"
    python: str
    env: tuple[tuple[str, str], ...]
    wants: Requirements | None = None  # None: the Python has everything that the job needs
    warm: tuple[str, ...] = ()  # modules that a zygote imports in addition
    image: Image | None = None  # None: no container

    def key(self) -> str:
        wants = self.wants.contents if self.wants else self.image or ""
        return hashlib.sha256(repr((self.mode, self.python, self.env, wants, self.warm)).encode()).hexdigest()[:16]


# A job may write to the launcher's socket or listen in its place, so numbers have the kernel's bounds.
_Pid = Annotated[int, msgspec.Meta(ge=0, le=1 << 22)]
_Gen = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
_Code = Annotated[int, msgspec.Meta(ge=0, le=255)]


class _Run(Struct, frozen=True):
    gen: _Gen
    pid: _Pid
    code: _Code | None = None


class _LauncherLine(Struct, frozen=True):
    """A line from the launcher: an answer, if ``ok`` is set, or else an event."""

    ok: bool | None = None
    error: str = ""
    pid: _Pid = 0
    guard: _Pid = 0
    mode: str = ""
    key: str = ""
    home: str = ""
    memory_mb: float | None = None
    run: _Run | None = None
    event: str = ""
    gen: _Gen = 0
    code: _Code = 0
    left: _Pid = 0


Posted = LauncherUp | LauncherLost | ChildEnded


class Launcher:
    """One launcher. Its own thread starts it and reads its socket; only the loop's thread may call the methods."""

    def __init__(self, folder: Path, job_path: JobPath, post: Callable[[Posted], None], log: Log) -> None:
        """``folder``: for the launcher's socket and logs. The launcher's processes carry its path as a mark."""
        self.folder = folder
        self._job_path = job_path
        self._post = post
        self._log = log
        self._socket: socket.socket | None = None
        self._answers: list[_LauncherLine] = []
        self._answered = threading.Condition()
        self._process: Process | None = None  # the guard, if this agent started it
        self._guard: int | None = None  # pidfd of the guard
        self._renewing = False
        self.pid = 0
        self.home = ""  # the folder from which the newest launcher was imported

    @property
    def up(self) -> bool:
        return self._socket is not None

    @property
    def stale(self) -> bool:
        """Whether an agent of another bundle started the launcher, so the next generation needs a new launcher."""
        return self.up and self.home != str(self._job_path.agent.resolve())

    @property
    def building(self) -> bool:
        """Whether the job's Python environment is being made, or its image pulled, which can take minutes."""
        return (self.folder / pyenv.BUILDING).exists()

    @property
    def gone(self) -> bool:
        """Whether the newest launcher and its processes have all ended."""
        return self.pid == 0 and (self._process is None or self._process.poll() is not None)

    def begin(self, kind: LauncherKind) -> None:
        """Find or start a launcher of this kind. Posts :class:`LauncherUp` once it answers.

        Posts :class:`LauncherLost` when it has ended or could not start; call this method again only after that.
        """
        threading.Thread(target=self._live, args=(kind,), name="launcher", daemon=True).start()

    def start(self, gen: int, args: list[str], env: Mapping[str, str], cwd: Path, log: Path) -> None:
        """Start torchrun for a generation.

        Raises:
            LaunchError: a generation still runs, or the launcher has ended.
        """
        self._ask({"op": "start", "gen": gen, "args": args, "env": dict(env), "cwd": str(cwd), "log": str(log)})

    def signal(self, gen: int, number: int) -> None:
        """Signal torchrun. Raises LaunchError if that generation does not run."""
        self._ask({"op": "signal", "gen": gen, "signal": number})

    def kill(self, gen: int) -> None:
        """Kill all processes of a generation. Raises LaunchError if the generation does not run."""
        self._ask({"op": "kill", "gen": gen})

    def stacks(self, gen: int) -> None:
        """Have a generation's stack traces written into its run folder. Raises LaunchError if it does not run."""
        self._ask({"op": "stacks", "gen": gen})

    def renew(self) -> None:
        """Replace the idle launcher by a new launcher of the same kind, which posts :class:`LauncherUp`."""
        self._renewing, self._socket = True, None
        self.quit()

    def quit(self) -> None:
        """End the launcher, even while it starts, and its processes; :attr:`gone` is True once all have ended."""
        if self.pid:
            jobhost.send_signal(self.pid, signal.SIGKILL)
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()  # never SIGKILL: the guard must end the processes that its launcher leaves

    def _ask(self, message: dict[str, object]) -> _LauncherLine:
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

    # The methods below run in the launcher's thread.

    def _last_words(self) -> str:
        return tail(self.folder, LOG, 4096).decode(errors="replace")

    def _live(self, kind: LauncherKind) -> None:
        reason = "it ended"
        try:
            sock = self._connect(kind)
        except (LaunchError, OSError) as error:
            self._post(LauncherLost(str(error), self._last_words()))
            return
        try:
            self._read(sock)
        except (OSError, msgspec.DecodeError) as error:
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

    def _connect(self, kind: LauncherKind) -> socket.socket:
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
            if code == 0:  # another launcher has locked the folder: it is starting or ending
                self._process = process = self._spawn(kind)
            time.sleep(RETRY_S)
        process.terminate()
        limit = f"{BUILD_S:.0f} s of building the job's environment" if time.monotonic() > latest else f"{WARM_S:.0f} s"
        raise LaunchError(f"the launcher was not ready after {limit}")

    def _try_connect(self) -> socket.socket | None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(ANSWER_S)  # a job may have put a socket there that never accepts
        folder = os.open(self.folder, os.O_PATH | os.O_DIRECTORY)
        try:
            sock.connect(f"/proc/self/fd/{folder}/{SOCKET}")  # as bound by the launcher: a path may be too long
            return sock
        except OSError:
            sock.close()
            return None
        finally:
            os.close(folder)

    def _greet(self, sock: socket.socket, kind: LauncherKind) -> _LauncherLine | None:
        """Return the launcher's status; kill a launcher of another kind and return None."""
        sock.settimeout(ANSWER_S)
        try:
            sock.sendall(b'{"op": "status"}\n')
            line = sock.makefile("rb").readline(LINE_BYTES)
            status = codec.decode(line, _LauncherLine)
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

    def _welcome(self, sock: socket.socket, status: _LauncherLine) -> socket.socket:
        self.pid, self.home = status.pid, status.home
        with contextlib.suppress(OSError):  # the guard has ended already
            self._guard = os.pidfd_open(status.guard) if status.guard else None
        self._socket = sock
        self._log("launcher.up", pid=status.pid, mode=status.mode, memory_mb=status.memory_mb)
        run = status.run
        self._post(LauncherUp(run.gen if run else None, run.code if run else None))
        return sock

    def _await_guard(self) -> None:
        """Wait for the end of the guard (``launcher/guard.py``): then no process of the launcher is left."""
        if self._guard is not None:
            select.select([self._guard], [], [], GUARD_S)
            os.close(self._guard)
            self._guard = None

    def _read(self, sock: socket.socket) -> None:
        lines = sock.makefile("rb")
        while raw := lines.readline(LINE_BYTES):
            line = codec.decode(raw, _LauncherLine)
            if line.event == "exit":
                self._post(ChildEnded(line.gen, line.code, line.left))
            elif line.ok is not None:
                with self._answered:
                    self._answers.append(line)
                    self._answered.notify()

    def _spawn(self, kind: LauncherKind) -> Process:
        env = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_JOBS}
        env |= dict(kind.env)
        path = str(self._job_path)
        env["PYTHONPATH"] = f"{path}:{env['PYTHONPATH']}" if env.get("PYTHONPATH") else path
        env[KEY] = kind.key()
        env.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # a zygote must never initialise CUDA
        if shutil.which(kind.python, path=env.get("PATH")) is None:
            raise LaunchError(f"cannot start {kind.python}: no such program")
        guard = [sys.executable, "-BIS", str(self._job_path.launcher / "guard.py"), str(self.folder)]
        command = [*guard, kind.python, "-m", "spotkeeper_agent.launcher", kind.mode, str(self.folder), *kind.warm]
        if (wants := kind.wants) is not None:
            beneath.make_way(self.folder, pyenv.BUILDING)
            making = [str(self._job_path.launcher / "pyenv.py"), str(self.folder)]
            command = [*guard, kind.python, "-B", *making, str(wants.source), wants.file, str(wants.home), kind.mode]
            command += kind.warm
        if (image := kind.image) is not None:
            if not has_units():
                raise LaunchError("image: machines of the one-machine cloud run no containers: leave it out there")
            beneath.make_way(self.folder, pyenv.BUILDING)
            env |= image.identity
            words = [str(self._job_path.launcher / "image.py"), str(self.folder), image.reference, image.python]
            command = [*guard, kind.python, "-B", *words, *map(str, image.folders)]
        self._log("launcher.start", mode=kind.mode, python=kind.python)
        try:
            return jobhost.spawn("launcher", command, env, self.folder / LOG)
        except OSError as error:
            raise LaunchError(f"cannot start a launcher: {error.strerror}") from None


def saver_pid(folder: Path) -> int | None:
    """Return the pid of the machine's saver, also if an earlier agent started it; None if no saver answers."""
    handle = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            if not stat.S_ISSOCK(os.stat(SAVER_SOCKET, dir_fd=handle, follow_symlinks=False).st_mode):
                return None  # a job may have left a link to another socket
            sock.setblocking(False)  # do not wait for a full socket that never accepts
            sock.connect(f"/proc/self/fd/{handle}/{SAVER_SOCKET}")
            peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pid: int = struct.unpack("3i", peer)[0]
            return pid if pid > 1 else None
    except OSError:
        return None
    finally:
        os.close(handle)


def start_saver(folder: Path, program: Path) -> Process:
    """Start the machine's saver, which ends by itself if another saver is running."""
    command = [sys.executable, "-S", str(program), "--socket", str(folder / SAVER_SOCKET)]
    env = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_JOBS}
    return jobhost.spawn("saver", command, env, folder / "saver.log")
