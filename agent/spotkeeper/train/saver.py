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
import contextlib
import ctypes
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from spotkeeper.train import seat, store
from spotkeeper.train.control import Commit, Fault
from spotkeeper.train.durable import Buffer, fault_of, refusal, write_checkpoint
from spotkeeper.train.messages import Hello, Message, MessageError, Publish, Reserve, Save, Stage, parse
from spotkeeper.train.seat import Answer, Peer
from spotkeeper.train.store import Manifest

_PR_SET_PDEATHSIG = 1


class _RefusedError(Exception):
    """A save that comes to nothing. ``fault`` says of which kind."""

    def __init__(self, fault: Fault, why: str) -> None:
        super().__init__(why)
        self.fault = fault


class Server:
    """Serves until told to stop; see the module's table of messages."""

    def __init__(self, *, listener: socket.socket | None = None, peer: socket.socket | None = None) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        self._peers: list[Peer] = []
        self._buffer = Buffer()
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
        self._peers.append(Peer(sock))
        self._selector.register(sock, selectors.EVENT_READ)

    def _drain(self, peer: Peer) -> None:
        """Handle all that has arrived; a closed connection is the end of a trainer, not of its save."""
        while True:
            try:
                data = peer.sock.recv(seat.MESSAGE)
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

    def _drop(self, peer: Peer) -> None:
        self._selector.unregister(peer.sock)
        peer.sock.close()
        self._peers.remove(peer)

    def _handle(self, peer: Peer, message: Message) -> None:
        match message:
            case Hello(folder, gen, keep):
                self._hello(peer, folder, gen, keep)
            case Reserve(size):
                self._reserve(peer, size)
            case Stage() if not self._fence(peer.gen):
                self._buffer.held = None
            case Save() as save:
                self._finish(peer, save.manifest.commit, partial(self._save, peer.gen, save))
            case Publish(manifest):
                self._finish(peer, manifest.commit, partial(self._publish, manifest))

    def _fence(self, gen: int) -> str:
        """Why a trainer of this generation is not served; '' if it is."""
        return "" if gen == self._gen else f"generation {self._gen} has spoken, this is {gen}"

    def _hello(self, peer: Peer, folder: Path, gen: int, keep: int) -> None:
        if gen < self._gen:
            peer.tell({"event": "fenced", "why": self._fence(gen)})
            return
        if any(other is not peer and other.folder for other in self._peers):
            # An older trainer still maps the memory and may still write to it: leave it to him.
            self._buffer.close()
            self._buffer = Buffer()
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
            peer.fail(fault_of(error), f"{folder}: {error}")
            return
        answer: Answer = {"event": "hello", "held": None, "quarantined": [asdict(skipped) for skipped in moved]}
        if held is not None:
            answer["held"] = held.to_bytes().decode()
            answer["stretches"] = [asdict(stretch) for stretch in self._buffer.stretches]
        peer.tell(answer)

    def _reserve(self, peer: Peer, size: int) -> None:
        if fence := self._fence(peer.gen):
            peer.fail(Fault.FENCED, fence)
            return
        try:
            self._buffer.reserve(size)
        except OSError as error:  # no memory left
            peer.fail(Fault.WRITE_FAILED, f"staging memory: {error}")
            return
        peer.tell({"event": "buffer", "bytes": self._buffer.size}, self._buffer.fd)

    def _finish(self, peer: Peer, commit: Commit, write: Callable[[Path], Answer]) -> None:
        """Have a checkpoint, or a part of one, made durable, say how that ended, and drop what is too old."""
        began, folder = time.monotonic(), peer.folder
        try:
            if folder is None:
                raise _RefusedError(Fault.FENCED, "no hello")
            if fence := self._fence(peer.gen):
                raise _RefusedError(Fault.FENCED, fence)
            answer = write(folder)
        except _RefusedError as error:
            peer.fail(error.fault, str(error), commit)
            return
        except OSError as error:
            peer.fail(fault_of(error), f"{folder}: {error}", commit)
            return
        peer.tell({"gen": commit.gen, "step": commit.step, **answer, "seconds": time.monotonic() - began})
        with contextlib.suppress(OSError):  # what could not be dropped is tried again after the next save
            store.prune(folder, peer.keep)

    def _save(self, gen: int, asked: Save, folder: Path) -> Answer:
        commit = asked.manifest.commit
        if why := refusal(folder, commit, gen):
            raise _RefusedError(Fault.FENCED, why)
        if not all(map(self._buffer.covers, asked.stretches)):
            raise MessageError(f"{commit}: a stretch lies outside the memory")
        written = write_checkpoint(folder, asked.manifest, self._buffer, asked.stretches, asked.part)
        self._buffer.held, self._buffer.stretches = written, asked.stretches
        return {"event": "written", "manifest": written.to_bytes().decode()} if asked.part else {"event": "durable"}

    def _publish(self, manifest: Manifest, folder: Path) -> Answer:
        """All nodes have their part: COMMIT, with the names of everybody's files."""
        try:
            if store.read_part(folder, manifest.commit).files != manifest.files:
                raise ValueError("it has other files than its part")
            store.publish(folder / str(manifest.commit), manifest)
        except ValueError as error:
            raise _RefusedError(Fault.WRITE_FAILED, f"{folder}: {error}") from None
        if self._buffer.held is not None and self._buffer.held.commit == manifest.commit:
            self._buffer.held = manifest
        return {"event": "durable"}


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
            server = Server(listener=seat.listen(args.socket))
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
