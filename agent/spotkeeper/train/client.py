"""The trainer's end of the saver: staging memory, requests, and the ends of saves.

Standard library only, like the saver itself. See ``saver`` for the messages.
"""

from __future__ import annotations

import array
import contextlib
import json
import mmap
import os
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spotkeeper.train import saver
from spotkeeper.train.control import Commit, Fault
from spotkeeper.train.durable import round_up
from spotkeeper.train.messages import Stretch
from spotkeeper.train.seat import MESSAGE, address
from spotkeeper.train.store import Manifest, Place, Skipped


class SaverError(Exception):
    """The saver refused or is gone. ``fault`` says which."""

    def __init__(self, fault: Fault, why: str) -> None:
        super().__init__(why)
        self.fault = fault


@dataclass(frozen=True)
class Durable:
    """A save that is on disk; ``seconds`` is what the saver took."""

    commit: Commit
    seconds: float


@dataclass(frozen=True)
class Written:
    """This node's part of a save is on disk; ``manifest`` names its files."""

    commit: Commit
    manifest: Manifest
    seconds: float


@dataclass(frozen=True)
class Failed:
    """A save that came to nothing."""

    commit: Commit
    fault: Fault
    why: str


@dataclass(frozen=True)
class Hello:
    """What the saver knows at the start of a generation."""

    held: Manifest | None  # in memory, durable, and as on disk
    stretches: tuple[Stretch, ...]
    quarantined: tuple[Skipped, ...]


Event = Durable | Written | Failed


class Client:
    """A trainer's connection to its node's saver. Not thread-safe."""

    def __init__(self, sock: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._sock = sock
        self._process = process
        self._events: deque[Event] = deque()
        self._pending: Commit | None = None
        self._reserving = False
        self._fd = -1
        self._size = 0
        self._map: mmap.mmap | None = None

    @classmethod
    def connect(cls, path: Path | str, timeout_s: float = 5.0) -> Client:
        """To the node's saver.

        Raises:
            SaverError: nobody listens there within ``timeout_s``.
        """
        path = Path(path)
        end = time.monotonic() + timeout_s
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                with address(path) as name:
                    sock.connect(name)
                return cls(sock)
            except OSError as error:
                sock.close()
                if time.monotonic() > end:
                    raise SaverError(Fault.SAVER_LOST, f"no saver at {path}: {error}") from None
            time.sleep(0.02)  # it starts in about 40 ms

    @classmethod
    def private(cls) -> Client:
        """Start a saver of our own, that ends with us."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            argv = [sys.executable, "-S", saver.__file__, "--fd", str(theirs.fileno())]
            # A session of its own: Ctrl-C in a terminal must not take it before the final save.
            process = subprocess.Popen(argv, pass_fds=[theirs.fileno()], start_new_session=True)
        return cls(ours, process)

    def close(self) -> None:
        """A save that runs is finished by the saver; a private saver is waited for."""
        self._sock.close()
        self._drop_map()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._process is not None:
            self._process.wait()

    @property
    def pending(self) -> Commit | None:
        """The save that is not durable yet."""
        return self._pending

    @property
    def pid(self) -> int:
        """Of a private saver, else 0."""
        return self._process.pid if self._process else 0

    @property
    def fd(self) -> int:
        """Of the memory; -1 before there is any."""
        return self._fd

    def hello(self, folder: Path, gen: int, keep: int) -> Hello:
        """Announce a generation. Waits until the save of an older one is finished.

        Raises:
            SaverError: FENCED, a newer generation has spoken; SAVER_LOST.
        """
        self._request({"op": "hello", "folder": str(folder.absolute()), "gen": gen, "keep": keep})
        answer = self._answer("hello", "fenced")
        if answer["event"] == "fenced":
            raise SaverError(Fault.FENCED, answer["why"])
        held = None if answer["held"] is None else Manifest.from_bytes(answer["held"].encode())
        return Hello(
            held,
            tuple(Stretch(**part) for part in answer.get("stretches", ())),
            tuple(Skipped(**part) for part in answer["quarantined"]),
        )

    def reserve(self, size: int) -> None:
        """Have the memory made ready in the background."""
        if size > self._size and not self._reserving:
            self._request({"op": "reserve", "bytes": round_up(size)})
            self._reserving = True

    def memory(self, size: int) -> mmap.mmap:
        """The staging memory, mapped, of ``size`` bytes or more; contents as they are."""
        if self._reserving:
            self._receive_buffer()
        if size > self._size or self._fd < 0:
            self.reserve(max(size, 1))
            self._receive_buffer()
        if self._map is None:
            self._map = mmap.mmap(self._fd, self._size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        return self._map

    def stage(self, size: int) -> mmap.mmap:
        """The memory, to be written to: whatever it held is given up first.

        Raises:
            SaverError: a save is running (call ``wait``), or the saver is gone.
        """
        if self._pending is not None:
            raise SaverError(Fault.WRITE_FAILED, f"{self._pending} is not durable yet")
        memory = self.memory(size)
        self._request({"op": "stage"})
        return memory

    def save(self, manifest: Manifest, stretches: tuple[Stretch, ...], *, part: bool = False) -> None:
        """Have what was staged made durable. Returns at once; ``poll`` or ``wait`` tell the end.

        ``part``: it is this node's part of sharded state, and waits for ``publish``.
        """
        self._request(
            {
                "op": "save",
                "manifest": manifest.to_bytes().decode(),
                "stretches": [asdict(stretch) for stretch in stretches],
                "part": part,
            }
        )
        self._pending = manifest.commit

    def publish(self, manifest: Manifest) -> None:
        """Have COMMIT written for a part: ``manifest`` is its own, with the files of all others."""
        self._request({"op": "publish", "manifest": manifest.to_bytes().decode()})
        self._pending = manifest.commit

    def poll(self) -> Event | None:
        """The end of a save, once, or None. Does not wait; about a microsecond while nothing runs."""
        while self._pending is not None and not self._events:
            if self._read(block=False) is None:
                break
        return self._events.popleft() if self._events else None

    def wait(self, timeout_s: float | None = None) -> Event | None:
        """Wait for the save that runs. None: none runs, or the time is up."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while self._pending is not None and not self._events:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return None
            self._sock.settimeout(left)
            try:
                self._read(block=True)
            except TimeoutError:
                return None
            finally:
                self._sock.settimeout(None)
        return self._events.popleft() if self._events else None

    def _request(self, message: dict[str, Any]) -> None:
        try:
            self._sock.sendall(json.dumps(message).encode())
        except OSError as error:
            raise SaverError(Fault.SAVER_LOST, f"the saver is gone: {error}") from None

    def _answer(self, *events: str) -> dict[str, Any]:
        """Block for one of ``events``; ends of saves that come first are kept for ``poll``."""
        while True:
            message = self._read(block=True)
            if message is not None and message["event"] in events:
                return message
            if message is not None and message["event"] == "failed" and "gen" not in message:
                raise SaverError(Fault(message["fault"]), message["why"])

    def _receive_buffer(self) -> None:
        answer = self._answer("buffer")
        self._reserving = False
        if answer["bytes"] != self._size:
            self._drop_map()
            self._size = answer["bytes"]

    def _drop_map(self) -> None:
        if self._map is not None:
            with contextlib.suppress(BufferError):  # tensors still look into it: it goes with them
                self._map.close()
            self._map = None

    def _read(self, *, block: bool) -> dict[str, Any] | None:
        """One message, or None where there is none."""
        flags = 0 if block else socket.MSG_DONTWAIT
        try:
            data, rights, _, _ = self._sock.recvmsg(MESSAGE, socket.CMSG_SPACE(4), flags | socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        except TimeoutError:
            raise
        except OSError:
            data, rights = b"", []
        if not data:
            raise self._lost()
        for _, _, raw in rights:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = array.array("i", raw[:4])[0]
        message: dict[str, Any] = json.loads(data)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        if "gen" not in message:
            return
        commit = Commit(message["gen"], message["step"])
        if message["event"] == "durable":
            self._events.append(Durable(commit, message["seconds"]))
        elif message["event"] == "written":
            manifest = Manifest.from_bytes(message["manifest"].encode())
            self._events.append(Written(commit, manifest, message["seconds"]))
        else:
            self._events.append(Failed(commit, Fault(message["fault"]), message["why"]))
        self._pending = None

    def _lost(self) -> SaverError:
        pending, self._pending = self._pending, None
        what = "" if pending is None else f" while it wrote {pending}"
        return SaverError(Fault.SAVER_LOST, f"the saver ended{what}")


def start(path: Path | str, *, python: str = sys.executable) -> subprocess.Popen[bytes]:
    """Start a node's saver at ``path`` and return when it answers. The agent's way, and the tests'.

    Raises:
        SaverError: it did not come up within five seconds.
    """
    process = subprocess.Popen(saver.command(path, python=python), start_new_session=True)
    try:
        Client.connect(path).close()
    except SaverError:
        process.kill()
        process.wait()
        raise
    return process


def new_manifest(commit: Commit, gang: tuple[Place, ...], versions: dict[str, str]) -> Manifest:
    """A manifest still without files; the saver fills them in as it hashes them."""
    return Manifest(commit, len(gang), gang, (), versions, time.time())
