"""The jobs' unit: starts launchers and savers as the jobs' user on the agent's request.

Under systemd the agent is not allowed to start, signal or see the job's processes. This process runs as the jobs' user,
does these things for the agent, and outlives every agent. Each program gets a cgroup below the unit's. The launcher
makes a cgroup per generation in its own, so that each generation can be killed alone. Agent and unit send one JSON
object per line through a unix socket that systemd makes and only the agent may open:

    -> {"op": "begin", "job": "abcd2345"}                <- {"ok": true}, or no answer: repeat in a second
    -> {"op": "start", "name": "launcher", "argv": [...], "env": {...}, "log": "..."}
    <- {"ok": true, "pid": 12}     and, on the same connection, at the program's end:  {"code": 0}
    -> {"op": "signal", "pid": 12, "signal": 15}         <- {"ok": true}
    -> {"op": "sweep", "folder": "...", "keep": [7]}     <- {"ok": true, "count": 0}

All jobs run as the same user, so files and processes of one job could attack the next job. Therefore each job has its
own home folder, and the home folders of other jobs are deleted. One process of the unit serves one job: it ends when
another job begins. Then systemd ends all processes in the unit's cgroup, removes the unit's private /tmp and its files
in /dev/shm, and starts the unit again. Between a job's generations a sweep ends every process of the cgroup except
the launcher and the programs that this process started. A job can kill or stop this process, but neither take its
descriptors nor listen in its place.

    python -IBS host.py             in the unit, which passes the socket
    python -IBS host.py FOLDER      elsewhere; makes the socket itself

Standard library only (10 MB resident).
"""

from __future__ import annotations

import sys

if not __package__:  # run as a file, with nothing on the path but the standard library
    # A bundle's job folder holds both packages; a checkout has the library one folder above.
    sys.path[:0] = [__file__.rsplit("/", 3)[0], __file__.rsplit("/", 4)[0]]

import contextlib
import errno
import json
import os
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from spotkeeper.train.core import beneath
from spotkeeper_agent.launcher.lines import Lines, Message
from spotkeeper_agent.launcher.process import own_cgroup, parent_of, reap_dead, refuse_inspection, shell_code, sweep

SOCKET = "host.sock"
LISTEN_FD = 3  # the first descriptor that systemd passes
DELEGATED = "SPOTKEEPER_DELEGATED"  # tells the launcher that it may divide its cgroup
OWN = ("HOME", "USER", "LOGNAME", "SHELL")  # the jobs' user's values replace those of the agent's request
SWEEP_S = 1.0  # real; processes that multiply faster than they are killed end with the unit's restart


@dataclass
class Host:
    """Serves the agent on ``listener``.

    ``cgroup``: the unit's cgroup, None if the unit has no cgroup of its own; ``home``: the folder that contains the
    jobs' home folders, each of which has its job's id as its name.
    """

    listener: socket.socket
    cgroup: Path | None
    home: Path
    _job: str | None = None  # None: not known yet; "": no job
    _began: int = 0
    _owners: dict[int, socket.socket] = field(default_factory=dict)  # pid -> the client to notify of its end
    _groups: dict[int, Path] = field(default_factory=dict)
    _lines: Lines = field(init=False)

    def serve(self) -> None:
        """Serve until killed."""
        self._lines = Lines(self.listener, self._answer, self._reap)
        self._lines.open()
        _ready()
        self._lines.serve()

    def _answer(self, client: socket.socket, line: bytes) -> Message:
        try:
            message = json.loads(line)
            op = message.pop("op")
            if op == "begin":
                self._begin(message["job"])
                return {"ok": True}
            if op == "start":
                pid = self._start(**message)
                self._owners[pid] = client
                return {"ok": True, "pid": pid}
            if op == "signal":
                pid = int(message["pid"])
                if pid <= 1:
                    raise ValueError(f"pid {pid}: a signal needs a pid above 1")  # to kill(2), 0 and less are groups
                os.kill(pid, int(message["signal"]))
                return {"ok": True}
            if op == "sweep":
                return {"ok": True, "count": self._sweep(Path(message["folder"]), set(map(int, message["keep"])))}
            return {"ok": False, "error": f"unknown op {op!r}"}
        except (ArithmeticError, ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            return {"ok": False, "error": f"{type(error).__name__}: {error}"}

    def _begin(self, job: str) -> None:
        """Serve this job from now on ("": no job); end this process if it has served another job."""
        if job != Path(job).name:
            raise ValueError(f"{job!r} is not a job's name")
        if self._job == job:
            return
        if self._job:
            raise SystemExit(0)
        for other in self.home.iterdir() if self.home.is_dir() else ():
            if other.name != job:
                _delete(other)
        if job:
            (self.home / job).mkdir(mode=0o755, parents=True, exist_ok=True)
        self._job = job

    def _start(self, name: str, argv: list[str], env: dict[str, str], log: str) -> int:
        if not self._job:
            raise ValueError("no job has begun")
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
            env["HOME"] = str(self.home / self._job)
            out = beneath.open_log(Path(log).parent, Path(log).name)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.execvpe(argv[0], argv, env)  # noqa: S606 - an argv; this process's descriptors close on exec
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

    def _sweep(self, folder: Path, keep: set[int]) -> int:
        """Kill the processes left of a generation except ``keep``; return about how many were found.

        They are found by the unit's cgroup; a cgroup that the launcher made in it counts as one process. Without a
        cgroup they are found by an environment variable or a resource limit that they inherited (``process.sweep``).
        """
        if self.cgroup is None:
            return sweep(folder, {os.getpid(), *keep})
        launchers = {pid for pid in keep if parent_of(pid) in self._owners}  # a job may claim any other pid
        known = {os.getpid(), *self._owners, *launchers}
        found, until = 0, time.monotonic() + SWEEP_S
        try:
            while count := self._end_strays(self.cgroup, known):
                found = max(found, count)
                if time.monotonic() > until:
                    raise SystemExit(
                        f"{count} processes of the job survive SIGKILL: the unit ends, so systemd kills its cgroup"
                    )
                self._reap()
                time.sleep(0.002)
        except OSError as error:  # a job may have changed its groups, which are this user's; systemd is root
            raise SystemExit(f"the unit's cgroup cannot be read, so the unit ends: {error}") from None
        return found

    def _end_strays(self, cgroup: Path, known: set[int]) -> int:
        """Send SIGKILL once to all processes of the unit's cgroup except ``known``; return their number.

        A cgroup that the launcher made counts as one process. The cgroup decides which processes are killed,
        because a process can change its name, but cannot leave its cgroup.
        """
        mixed = [cgroup, *self._groups.values()]
        count = sum(_end_group(group) for parent in mixed for group in _below(parent) if group not in mixed)
        for group in mixed:
            for pid in set(map(int, _read(group / "cgroup.procs").split())) - known:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    count += 1
        return count

    def _reap(self) -> None:
        for pid, code in reap_dead().items():
            client, group = self._owners.pop(pid, None), self._groups.pop(pid, None)
            if group is not None:
                _remove(group)
            if client is not None:
                self._lines.send(client, {"code": shell_code(code)})


def _below(group: Path) -> list[Path]:
    try:
        with os.scandir(group) as entries:
            return [group / entry.name for entry in entries if entry.is_dir()]
    except FileNotFoundError:
        return []


def _read(file: Path) -> str:
    """Return the content of a cgroup's file; "" if the cgroup is gone."""
    try:
        return file.read_text()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENODEV):
            return ""
        raise


def _end_group(group: Path) -> bool:
    """Kill all processes of a cgroup and of the cgroups below it, also new forks; return whether there were any."""
    if "populated 1" not in _read(group / "cgroup.events"):
        return False
    with contextlib.suppress(FileNotFoundError):
        (group / "cgroup.kill").write_text("1")
    return True


def _remove(group: Path) -> None:
    """Kill the processes left in an ended program's cgroup, and remove the cgroup."""
    with contextlib.suppress(OSError):
        (group / "cgroup.kill").write_text("1")
    with contextlib.suppress(OSError):
        for child in sorted(_below(group), reverse=True):
            child.rmdir()
        group.rmdir()


def _delete(path: Path) -> None:
    """Delete a file or a whole folder of any depth, whatever its modes; links are not followed.

    Raises:
        OSError: a part could not be deleted.
    """
    if path.is_dir() and not path.is_symlink():
        _run("chmod", "-R", "u+rwX", str(path))
    _run("rm", "-rf", "--", str(path))
    if path.exists() or path.is_symlink():
        raise OSError(f"{path}: cannot be deleted")


def _run(*argv: str) -> None:
    os.waitpid(os.posix_spawnp(argv[0], argv, os.environ), 0)


def passed_listener() -> socket.socket | None:
    """Return the socket of the unit ``spotkeeper-job.socket`` (sd_listen_fds(3)); None outside the unit.

    systemd, as root, has called listen(2). Do not call it again: clients check that root has called it, and
    another call would show them this user. Connections that an earlier process did not accept are closed; their clients
    repeat the request.
    """
    given = {name: os.environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")}
    if (given["LISTEN_PID"], given["LISTEN_FDS"]) != (str(os.getpid()), "1"):
        return None
    listener = socket.socket(fileno=LISTEN_FD)
    listener.set_inheritable(False)
    listener.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            listener.accept()[0].close()
    listener.setblocking(True)
    return listener


def listen(folder: Path) -> socket.socket:
    """Make a socket that this user and this user's group may open."""
    path = folder / SOCKET
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o117)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    listener.listen(8)
    return listener


def _ready() -> None:
    address = os.environ.pop("NOTIFY_SOCKET", "")
    if address:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(b"READY=1", "\0" + address[1:] if address[0] == "@" else address)


if __name__ == "__main__":
    refuse_inspection()
    passed = passed_listener()
    # Only in the unit: a shell's cgroup may also be writable, and contains other processes than jobs.
    Host(passed or listen(Path(sys.argv[1])), own_cgroup() if passed else None, Path(os.environ["HOME"])).serve()
