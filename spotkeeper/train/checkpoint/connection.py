"""A trainer's connection to its node's saver: finds or starts the saver, carries messages, notices that it hangs.

Standard library only, like the saver.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from spotkeeper.train.agent_link.control import Commit, Fault
from spotkeeper.train.checkpoint import saver
from spotkeeper.train.checkpoint.protocol import MESSAGE, SaverError, SaverSilentError, address

PATIENCE_S = 120.0  # time to wait for a saver without progress: it is stopped, or waits for a disk that does not answer
_POLL_S = 0.5

C = TypeVar("C", bound="SaverConnection")
Limit = Callable[[], float | None]  # seconds of silence to accept now; None: PATIENCE_S


class SaverConnection(ABC):
    """A socket to a saver, and the saver's process if this connection started it. Not thread-safe.

    Args:
        process: the saver, if this connection started it.
        limit: called while the connection waits. It returns the seconds without progress after which the saver counts
            as lost, at most :data:`PATIENCE_S` (two minutes); None: :data:`PATIENCE_S`.
    """

    def __init__(
        self, sock: socket.socket, process: subprocess.Popen[bytes] | None = None, limit: Limit = lambda: None
    ) -> None:
        self._sock = sock
        self._process = process
        self._limit = limit
        _OPEN.add(self)

    @classmethod
    def connect(cls: type[C], path: Path | str, timeout_s: float = 5.0, limit: Limit = lambda: None) -> C:
        """Connect to the node's saver.

        Raises:
            SaverError: no saver answers within ``timeout_s``.
        """
        path = Path(path)
        end = time.monotonic() + timeout_s
        while True:
            try:
                return cls(_connected(path), limit=limit)
            except OSError as error:
                if time.monotonic() > end:
                    raise SaverError(Fault.SAVER_LOST, f"no saver at {path}: {error}") from None
            time.sleep(0.02)  # a saver starts in about 40 ms

    @classmethod
    def private(cls: type[C], limit: Limit = lambda: None) -> C:
        """Start a saver for this process; it ends with the process.

        Raises:
            SaverError: the process cannot start a saver, or has no file descriptor left.
        """
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                argv = [sys.executable, "-S", saver.__file__, "--fd", str(theirs.fileno())]
                try:
                    # In its own session: Ctrl-C in a terminal must not end it before the final save.
                    process = subprocess.Popen(argv, pass_fds=[theirs.fileno()], start_new_session=True)
                except OSError:
                    ours.close()
                    raise
        except OSError as error:
            raise SaverError(Fault.SAVER_LOST, f"no saver process can be started: {error}") from None
        return cls(ours, process, limit)

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):  # the saver is gone already
            # Ends the connection even if another process has a copy of the socket.
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _await_end(self) -> None:
        """Wait for the end of the saver, if this connection started it; kill it if it hangs."""
        pulse = self._pulse()
        while self._process is not None:
            try:
                self._process.wait(_POLL_S)
                self._process = None
            except subprocess.TimeoutExpired:
                if pulse.stopped(self._patience_s()):
                    self._kill()

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a process that waits for its disk does not die
                process.wait(_POLL_S)

    def _forget(self) -> None:
        """Close the socket in a fork of the trainer.

        The saver sees the trainer's end only after every process has closed the socket; forks can outlive the trainer.
        """
        self._sock.close()

    @property
    def pid(self) -> int:
        """Pid of the saver if this connection started it, otherwise 0."""
        return self._process.pid if self._process else 0

    def _request(self, message: dict[str, Any]) -> None:
        try:
            self._sock.sendall(json.dumps(message).encode())
        except OSError as error:
            raise SaverError(Fault.SAVER_LOST, f"the saver is gone: {error}") from None

    def _answer(self, *events: str) -> dict[str, Any]:
        """Wait for a message of the kinds ``events`` and return it; keep results of saves for ``poll``."""
        pulse = self._pulse()
        while True:
            message = self._read_soon()
            if message is None:
                self._need(pulse)
            elif message["event"] in events:
                return message
            elif message["event"] == "failed" and "gen" not in message:
                raise SaverError(Fault(message["fault"]), message["why"])

    def _pulse(self) -> _Liveness:
        if self._process is not None:
            return _Liveness(self._process.pid)
        with contextlib.suppress(OSError):
            return _Liveness(struct.unpack("3i", self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])
        return _Liveness(0)

    def _need(self, pulse: _Liveness) -> None:
        patience_s = self._patience_s()
        if not pulse.stopped(patience_s):
            return
        self._kill()
        lost = self._lost(f"the saver has done nothing for {patience_s:.0f} s (a hanging disk, or a stopped process)")
        raise SaverSilentError(lost.fault, str(lost))

    def _patience_s(self) -> float:
        limit = self._limit()
        return PATIENCE_S if limit is None else min(limit, PATIENCE_S)

    def _read_soon(self, end: float | None = None) -> dict[str, Any] | None:
        """Read one message; None if no message arrives within half a second, or before ``end`` (monotonic)."""
        self._sock.settimeout(_POLL_S if end is None else min(_POLL_S, max(0.001, end - time.monotonic())))
        try:
            return self._read(block=True)
        except TimeoutError:
            return None
        finally:
            self._sock.settimeout(None)

    def _read_all(self) -> None:
        """Read all messages that have arrived. Fails if the saver has closed the connection."""
        while self._read(block=False) is not None:
            pass

    def _read(self, *, block: bool) -> dict[str, Any] | None:
        """Read one message; None if no message has arrived."""
        flags = 0 if block else socket.MSG_DONTWAIT
        try:
            data, rights, _, _ = self._sock.recvmsg(MESSAGE, socket.CMSG_SPACE(4), flags | socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        except TimeoutError:
            raise
        except OSError as error:
            raise self._lost(f"the saver's message cannot be read: {error}") from None
        if not data:
            raise self._lost("the saver ended")
        fds = [array.array("i", raw[:4])[0] for _, _, raw in rights]
        message: dict[str, Any] = json.loads(data)
        return self._receive(message, fds)

    def _lost(self, why: str) -> SaverError:
        """Return the error for a broken connection, and forget the running save."""
        pending = self._forget_save()
        what = "" if pending is None else f" while it wrote {pending}"
        return SaverError(Fault.SAVER_LOST, f"{why}{what}")

    @abstractmethod
    def _receive(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Take over what a message and its descriptors bring; return the message."""

    @abstractmethod
    def _forget_save(self) -> Commit | None:
        """Forget the running save, whose result will not come, and return its checkpoint."""


class _Liveness:
    """Tells a hanging process from a busy one, which uses CPU time even in a copy or write that takes hours."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seen = ""
        self._since = time.monotonic()

    def stopped(self, patience_s: float) -> bool:
        """Whether the process has used no CPU time for ``patience_s`` seconds. False if the kernel shows no times."""
        with contextlib.suppress(OSError):
            seen = " ".join(path.read_text() for path in Path(f"/proc/{self._pid}/task").glob("*/schedstat"))
            if seen != self._seen or not seen:
                self._seen, self._since = seen, time.monotonic()
        return time.monotonic() - self._since >= patience_s


def _connected(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(_POLL_S)  # a hanging saver accepts nothing, and its queue may be full
        with address(path) as name:
            sock.connect(name)
        sock.settimeout(None)
    except OSError:
        sock.close()
        raise
    return sock


_OPEN: weakref.WeakSet[SaverConnection] = weakref.WeakSet()


def _forget_all() -> None:
    for connection in list(_OPEN):
        connection._forget()


os.register_at_fork(after_in_child=_forget_all)  # loader workers are forks and may outlive the trainer
