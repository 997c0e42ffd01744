"""The saver: one small process per node that makes staged checkpoints durable.

It knows nothing of tensors. A trainer (local rank 0) copies its state into a memory file
that the saver owns, and says which bytes make which file; the saver writes them with
O_DIRECT while it hashes them, then COMMIT, then drops what is too old. It outlives
generations: what was staged before its trainer was killed still becomes durable, and the
next trainer finds the memory warm, or takes the state over from it.

Standard library only (7 MB resident, against 500 MB with torch). It handles one message at
a time, so it is never asked two things at once, and the greeting of a new generation is
answered after the save of an older one is finished.

Messages are JSON over a unix socket of type SEQPACKET:

======== ============================== ==================================================
 op       with                           answer
======== ============================== ==================================================
hello    folder, gen, keep              hello: held (commit and files in memory, or null),
                                        quarantined; ``fenced`` if a newer one has spoken
reserve  bytes                          buffer, with the memory file's descriptor
stage    -                              none; what the memory held is no longer valid
save     manifest, stretches, part      durable (seconds), or failed (fault, why); of a part of
                                        sharded state ``written``, with the manifest
publish  manifest                       durable, or failed: COMMIT of a part that was written
======== ============================== ==================================================

A message of a trainer whose generation is older than the newest that said hello, or than
what is on the disk, is refused: a writer of an old generation never starts. (The checkpoint
may be of an older generation than its writer: a copy received from a peer keeps its name.)
What is no message at all ends its connection, and nothing else.
"""

from __future__ import annotations

import sys

if not __package__:  # run as a file: `python -S saver.py`; the folder of this file must not shadow anything
    sys.path[0] = __file__.rsplit("/", 3)[0]

import argparse
import array
import contextlib
import ctypes
import errno
import hashlib
import json
import mmap
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from spotkeeper.train import store
from spotkeeper.train.control import Commit, Fault
from spotkeeper.train.messages import Hello, Message, MessageError, Publish, Reserve, Save, Stage, Stretch, parse
from spotkeeper.train.store import FileSum, Manifest

PAGE = 4096
_CHUNK = 16 << 20
MESSAGE = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PR_SET_PDEATHSIG = 1


class _Buffer:
    """The memory file: grows, never shrinks, is mapped by trainer and saver."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("spotkeeper", os.MFD_CLOEXEC)
        self.size = 0
        self.held: Manifest | None = None  # what it holds, once that is durable
        self.stretches: tuple[Stretch, ...] = ()

    def reserve(self, size: int) -> None:
        """Fault the memory in here: fresh pages would cost the training loop 3 s per GB."""
        if size > self.size:
            os.posix_fallocate(self.fd, 0, size)
            self.size = size

    def covers(self, stretch: Stretch) -> bool:
        whole = stretch.offset % PAGE == 0
        return whole and stretch.offset + max(PAGE, round_up(stretch.bytes)) <= self.size

    def close(self) -> None:
        os.close(self.fd)


@dataclass
class _Peer:
    """A connected trainer."""

    sock: socket.socket
    gen: int = -1
    folder: Path | None = None
    keep: int = 2


class Server:
    """Serves until told to stop; see the module's table of messages."""

    def __init__(self, *, listener: socket.socket | None = None, peer: socket.socket | None = None) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        self._peers: list[_Peer] = []
        self._buffer = _Buffer()
        self._gen = -1
        self._stopping = False
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        for sock in (self._wake_out, listener):
            if sock is not None:
                sock.setblocking(False)
                self._selector.register(sock, selectors.EVENT_READ)
        if peer is not None:
            self._admit(peer)

    def stop(self, *_: object) -> None:
        """Leave after the message in hand. Signal handler; a save that runs is finished."""
        self._stopping = True

    def serve(self) -> None:
        signal.set_wakeup_fd(self._wake_in.fileno(), warn_on_full_buffer=False)
        while not self._stopping and (self._listener or self._peers):
            ready = {key.fileobj for key, _ in self._selector.select()}
            if self._wake_out in ready:
                with contextlib.suppress(BlockingIOError):
                    self._wake_out.recv(64)
            # Oldest first: what a dead trainer had staged goes before the greeting of its successor.
            for peer in [peer for peer in self._peers if peer.sock in ready]:
                self._drain(peer)
            if self._listener in ready and self._listener is not None:
                with contextlib.suppress(BlockingIOError):
                    self._admit(self._listener.accept()[0])
        for peer in list(self._peers):  # a trainer that staged, asked and died: its message may still lie here
            self._drain(peer)

    def _admit(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._peers.append(_Peer(sock))
        self._selector.register(sock, selectors.EVENT_READ)

    def _drain(self, peer: _Peer) -> None:
        """Handle all that has arrived; a closed connection is the end of a trainer, not of its save."""
        while True:
            try:
                data = peer.sock.recv(MESSAGE)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                self._drop(peer)
                return
            try:
                self._handle(peer, parse(data))
            except MessageError as error:
                print(f"saver: a connection is closed for what it said: {str(error)[:200]}", file=sys.stderr)
                self._drop(peer)
                return

    def _drop(self, peer: _Peer) -> None:
        self._selector.unregister(peer.sock)
        peer.sock.close()
        self._peers.remove(peer)

    def _handle(self, peer: _Peer, message: Message) -> None:
        fence = "" if peer.gen == self._gen else f"generation {self._gen} has spoken, this is {peer.gen}"
        match message:
            case Hello(folder, gen, keep):
                self._hello(peer, folder, gen, keep)
            case Reserve(size):
                self._reserve(peer, size, fence)
            case Stage() if not fence:
                self._buffer.held = None
            case Save(manifest, stretches, part):
                self._save(peer, manifest, stretches, fence, part)
            case Publish(manifest):
                self._publish(peer, manifest, fence)

    def _hello(self, peer: _Peer, folder: Path, gen: int, keep: int) -> None:
        if gen < self._gen:
            _send(peer.sock, {"event": "fenced", "why": f"generation {self._gen} has spoken, this is {gen}"})
            return
        if any(other is not peer and other.folder for other in self._peers):
            # An older trainer still maps the memory and may still write to it: leave it to him.
            self._buffer.close()
            self._buffer = _Buffer()
        self._gen, peer.gen, peer.folder, peer.keep = gen, gen, folder, keep
        held = self._buffer.held
        try:
            folder.mkdir(parents=True, exist_ok=True)
            store.sweep(folder)
            moved = store.quarantine_incomplete(folder)
            if held is not None and held.commit not in (*store.complete(folder), *store.partial(folder)):
                held = None  # pruned, damaged or of another folder: memory is worth no more than the disk says
        except OSError as error:  # such as a disk that has become read-only
            peer.folder = None
            _send(peer.sock, {"event": "failed", "fault": int(_fault(error)), "why": f"{folder}: {error}"})
            return
        answer: dict[str, Any] = {"event": "hello", "held": None, "quarantined": [asdict(skipped) for skipped in moved]}
        if held is not None:
            answer["held"] = held.to_bytes().decode()
            answer["stretches"] = [asdict(stretch) for stretch in self._buffer.stretches]
        _send(peer.sock, answer)

    def _reserve(self, peer: _Peer, size: int, fence: str) -> None:
        if fence:
            _send(peer.sock, {"event": "failed", "fault": int(Fault.FENCED), "why": fence})
            return
        try:
            self._buffer.reserve(size)
        except OSError as error:  # no memory left
            _send(peer.sock, {"event": "failed", "fault": int(Fault.WRITE_FAILED), "why": f"staging memory: {error}"})
            return
        _send(peer.sock, {"event": "buffer", "bytes": self._buffer.size}, self._buffer.fd)

    def _save(self, peer: _Peer, manifest: Manifest, stretches: tuple[Stretch, ...], fence: str, part: bool) -> None:
        began = time.monotonic()
        commit = manifest.commit
        answer: dict[str, Any] = {"gen": commit.gen, "step": commit.step}
        if peer.folder is None:
            fence = "no hello"
        try:
            if peer.folder is not None and not fence:
                fence = _refusal(peer.folder, commit, peer.gen)
            if fence or peer.folder is None:
                _send(peer.sock, answer | {"event": "failed", "fault": int(Fault.FENCED), "why": fence})
                return
            if not all(map(self._buffer.covers, stretches)):
                raise MessageError(f"{commit}: a stretch lies outside the memory")
            written = _write_checkpoint(peer.folder, manifest, self._buffer, stretches, part)
        except OSError as error:
            _send(
                peer.sock, answer | {"event": "failed", "fault": int(_fault(error)), "why": f"{peer.folder}: {error}"}
            )
            return
        self._buffer.held, self._buffer.stretches = written, stretches
        told = {"event": "written", "manifest": written.to_bytes().decode()} if part else {"event": "durable"}
        _send(peer.sock, answer | told | {"seconds": time.monotonic() - began})
        with contextlib.suppress(OSError):  # what could not be dropped is tried again after the next save
            store.prune(peer.folder, peer.keep)

    def _publish(self, peer: _Peer, manifest: Manifest, fence: str) -> None:
        """All nodes have their part: COMMIT, with the names of everybody's files."""
        began = time.monotonic()
        commit = manifest.commit
        answer: dict[str, Any] = {"gen": commit.gen, "step": commit.step}
        if peer.folder is None:
            fence = "no hello"
        try:
            if fence or peer.folder is None:
                _send(peer.sock, answer | {"event": "failed", "fault": int(Fault.FENCED), "why": fence})
                return
            if store.read_part(peer.folder, commit).files != manifest.files:
                raise ValueError("it has other files than its part")
            store.publish(peer.folder / str(commit), manifest)
        except (OSError, ValueError) as error:
            fault = _fault(error) if isinstance(error, OSError) else Fault.WRITE_FAILED
            _send(peer.sock, answer | {"event": "failed", "fault": int(fault), "why": f"{peer.folder}: {error}"})
            return
        if self._buffer.held is not None and self._buffer.held.commit == commit:
            self._buffer.held = manifest
        _send(peer.sock, answer | {"event": "durable", "seconds": time.monotonic() - began})
        with contextlib.suppress(OSError):
            store.prune(peer.folder, peer.keep)


def _fault(error: OSError) -> Fault:
    return Fault.DISK_FULL if error.errno in _FULL else Fault.WRITE_FAILED


def _refusal(folder: Path, commit: Commit, gen: int) -> str:
    """Why a writer of generation ``gen`` may not write ``commit``, by what is on the disk; '' if it may."""
    there = store.scan(folder)
    if there and there[0].gen > gen:
        return f"the disk has {there[0]}, of a newer generation than the writer's {gen}"
    return f"{commit} is there already" if commit in there else ""


def _write_checkpoint(
    folder: Path, manifest: Manifest, buffer: _Buffer, stretches: tuple[Stretch, ...], part: bool
) -> Manifest:
    """Write all files, then COMMIT (PART). On an error nothing of it stays. Returns the manifest with sums."""
    home = folder / str(manifest.commit)
    home.mkdir()
    try:
        try:
            sums = _write_files(home, buffer.fd, stretches)
        except OSError as error:
            if error.errno not in _FULL or not store.empty_quarantine(folder):
                raise
            sums = _write_files(home, buffer.fd, stretches)
        manifest = replace(manifest, files=sums)
        (store.publish_part if part else store.publish)(home, manifest)
    except OSError:
        with contextlib.suppress(OSError):
            store.quarantine(folder, manifest.commit)  # a rename: at no moment half a checkpoint with a COMMIT
            store.empty_quarantine(folder)
        raise
    return manifest


def _write_files(home: Path, memory: int, stretches: tuple[Stretch, ...]) -> tuple[FileSum, ...]:
    return tuple(_write_file(home / stretch.name, memory, stretch) for stretch in stretches)


def _write_file(path: Path, memory: int, stretch: Stretch) -> FileSum:
    """One thread writes, one hashes; both let the interpreter's lock go."""
    rounded = round_up(stretch.bytes)
    with mmap.mmap(memory, max(rounded, PAGE), prot=mmap.PROT_READ, offset=stretch.offset) as mapped:
        view = memoryview(mapped)
        digest = hashlib.sha256()
        hashing = threading.Thread(target=_hash, args=(digest, view[: stretch.bytes]))
        hashing.start()
        try:
            _write_bytes(path, view, stretch.bytes)
        finally:
            hashing.join()
            view.release()
    return FileSum(stretch.name, stretch.bytes, digest.hexdigest())


def _hash(digest: Any, view: memoryview) -> None:
    with view:
        for at in range(0, len(view), _CHUNK):
            digest.update(view[at : at + _CHUNK])


def _write_bytes(path: Path, view: memoryview, size: int) -> None:
    """Past the page cache where the file system allows: buffered, 2 GB took up to 17 s to become durable."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        if size:
            os.posix_fallocate(fd, 0, size)  # a full disk says so here, before a byte is written
        if not _write_direct(path, view, size):
            with view[:size] as part:
                _write_all(fd, part)
        os.ftruncate(fd, size)
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_direct(path: Path, view: memoryview, size: int) -> bool:
    """Whole pages with O_DIRECT; the caller cuts the last one to length. False where it is refused."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    try:
        with view[: round_up(size)] as part:
            _write_all(fd, part)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    finally:
        os.close(fd)
    return True


def _write_all(fd: int, view: memoryview) -> None:
    """What is cut from ``view`` is given back at once: what an error's traceback still held would keep it mapped."""
    at = 0
    while at < len(view):
        with view[at : at + _CHUNK] as chunk:
            at += os.pwrite(fd, chunk, at)


def round_up(size: int) -> int:
    """To whole pages."""
    return -(-size // PAGE) * PAGE


def _send(sock: socket.socket, message: dict[str, Any], fd: int | None = None) -> None:
    """Best effort: a trainer that is gone does not hear, and its checkpoint is on disk all the same."""
    rights = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
    with contextlib.suppress(ConnectionError, BlockingIOError):
        sock.sendmsg([json.dumps(message).encode()], rights)


@contextlib.contextmanager
def address(path: Path) -> Iterator[str]:
    """A name for ``path`` that fits into the 108 bytes of a unix address, however deep it lies."""
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


def listen(path: Path) -> socket.socket:
    """A listening socket at ``path``; one that a dead saver left is replaced.

    Raises:
        FileExistsError: a saver answers there already.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with address(path) as name:
        with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
            probe = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with probe:
                probe.connect(name)
            sock.close()
            raise FileExistsError(errno.EEXIST, "a saver answers there already", str(path))
        path.unlink(missing_ok=True)
        old = os.umask(0o117)
        try:
            sock.bind(name)
        finally:
            os.umask(old)
    sock.listen()
    return sock


def _die_with_parent() -> None:
    """SIGTERM when the trainer goes: the save in hand is finished, then the process ends."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(0)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="saver", description="Make staged checkpoints durable.")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--socket", type=Path, help="listen at this unix socket until SIGTERM")
    where.add_argument("--fd", type=int, help="serve this inherited socket, and end with the parent")
    args = parser.parse_args(argv)
    if args.socket:
        try:
            server = Server(listener=listen(args.socket))
        except OSError as error:
            print(f"saver: {args.socket}: {error.strerror}", file=sys.stderr)
            return 1
    else:
        _die_with_parent()
        server = Server(peer=socket.socket(fileno=args.fd))
    signal.signal(signal.SIGTERM, server.stop)
    signal.signal(signal.SIGINT, server.stop)
    server.serve()
    return 0


def command(path: Path | str, *, python: str = sys.executable) -> list[str]:
    """The argument list that starts a node's saver at the unix socket ``path``. Needs no environment."""
    return [python, "-S", __file__, "--socket", str(path)]


if __name__ == "__main__":
    raise SystemExit(main())
