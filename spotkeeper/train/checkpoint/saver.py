"""The saver: one small process per node that makes staged checkpoints durable.

The saver handles bytes, not tensors. A trainer (local rank 0) copies its state into a memory file that the saver owns,
and lists which bytes go into which file. The saver writes the files with O_DIRECT while it hashes them, writes COMMIT,
then deletes old checkpoints. The saver outlives generations: a checkpoint staged before its trainer was killed still
becomes durable. The next trainer finds the memory allocated, and restores its state from there if possible.

**Images.** Unless ``checkpoint.snapshots`` is off, a trainer copies its state into an image memory and seals the image
once it is complete (``seal.py``), without a message. A save is an image that the trainer then asks to write. Once the
trainer is gone, its newest image is written, and the next trainer may restore it from memory meanwhile
(``handover.py``). So a lost machine costs the survivors only the steps since their last image. There are up to three
image memories; the last one to be allocated takes over the staging memory.

Standard library only (7 MB resident, 500 MB with torch). The saver handles one message at a time, so it answers the
``hello`` of a new generation after the save that an older generation requested is finished. It must for a save in
staging memory, which counts only once it is on disk. A save of an image need not be waited for, since an image at least
as new is offered; but the saver writes at most a quarter of the time (``pace.py``), so few restarts meet such a save,
and they wait for the rest of one write.

Messages are JSON over a unix socket of type SEQPACKET. ``hello`` announces a generation, ``keep`` is the number of
checkpoints to keep, and ``stretches`` are the bytes of the memory file that become one file each:

======== ============================== ==================================================
 op       with                           answer
======== ============================== ==================================================
hello    folder, gen, keep              hello: staged (the manifest in memory, or null),
                                        stretches if staged, quarantined; image (bytes, shared,
                                        writing, gen, step; or null), with its memory's descriptor;
                                        if writing, durable or failed follow, with ``kept``.
                                        Or ``fenced`` (why): ``gen`` is too old
reserve  bytes                          buffer, with the memory file's descriptor
image    number (0 to 2), bytes         image (number, bytes), with the image memory's descriptor;
                                        bytes is 0 if the memory is refused (fault, why);
                                        took: whether this was the staging memory
part_    number (0 to 3; with 0 bytes   part_image (number, bytes), with the descriptor of a memory
image    to 7), bytes                   for a part of sharded state (``peers.py``); bytes is 0 if the
                                        memory is refused (fault, why), or if 0 were requested and it
                                        is empty. From number 4 on: what a trainer left that was
                                        still connected at ``hello`` (it may change the memory)
stage    -                              none; the memory's former content is invalid
save     manifest, stretches, part,     durable (seconds), or failed (fault, why); for a part
         image (number; none: staging)  of sharded state ``written``, with the manifest
publish  manifest                       durable once COMMIT is beside the part; or failed
======== ============================== ==================================================

The saver refuses a trainer whose generation is older than the newest generation that sent hello or is on disk, so no
trainer of an old generation writes. (A checkpoint may be of an older generation than the trainer that saves it: a copy
received from a peer keeps its name.) An invalid packet ends only the connection that sent it.
"""

from __future__ import annotations

import sys

if not __package__:  # run as a file (`python -S saver.py`): modules in its folder must not shadow others
    sys.path[0] = __file__.rsplit("/", 4)[0]

import contextlib
import ctypes
import errno
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from spotkeeper.train.agent_link.control import Commit, Fault
from spotkeeper.train.checkpoint import protocol, store
from spotkeeper.train.checkpoint.durable import fault_of, reason, save_refusal, write_checkpoint
from spotkeeper.train.checkpoint.handover import Handover
from spotkeeper.train.checkpoint.manifest import Manifest
from spotkeeper.train.checkpoint.protocol import (
    Answer,
    HelloRequest,
    ImageRequest,
    Peer,
    PublishRequest,
    Request,
    RequestError,
    ReserveRequest,
    SaveRequest,
    StageRequest,
    parse,
)
from spotkeeper.train.checkpoint.saver_memories import SaverMemories
from spotkeeper.train.checkpoint.seal import check_seal

_PR_SET_PDEATHSIG = 1
_RETRY_S = 0.2  # pause between two tries to accept a connection


class _SaveRefusedError(Exception):
    """The saver refuses a save; ``fault`` says why."""

    def __init__(self, fault: Fault, why: str) -> None:
        super().__init__(why)
        self.fault = fault


class SaverServer:
    """Serves trainers until it is stopped."""

    def __init__(self, *, listener: socket.socket | None = None, peer: socket.socket | None = None) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        self._peers: list[Peer] = []
        self._folder: Path | None = None  # of the newest hello
        self._gen = -1
        self._stopping = False
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._handover = Handover(self._wake)
        self._memories = SaverMemories(self._handover, self._await_writes)
        for sock in (self._wake_out, listener):
            if sock is not None:
                sock.setblocking(False)
                self._selector.register(sock, selectors.EVENT_READ)
        if peer is not None:
            self._admit(peer)

    def stop(self, *_: object) -> None:
        """Stop after the current message, so a running save is finished. A signal handler."""
        self._stopping = True

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is awake then
            self._wake_in.send(b"\0")

    def serve(self) -> None:
        signal.set_wakeup_fd(self._wake_in.fileno(), warn_on_full_buffer=False)
        while not self._stopping and (self._listener or self._peers):
            ready = {key.fileobj for key, _ in self._selector.select()}
            if self._wake_out in ready:
                with contextlib.suppress(BlockingIOError):
                    self._wake_out.recv(64)
                self._end_writes()
            # Oldest connection first: the save of a dead trainer comes before the next trainer's hello.
            for peer in [peer for peer in self._peers if peer.sock in ready]:
                self._drain(peer)
            if self._listener in ready and self._listener is not None:
                self._accept(self._listener)
        for peer in list(self._peers):  # the save request of a dead trainer may still be unread
            self._drain(peer)
        if self._listener is None:  # the trainer is dead, but its last thread may still have the connection open
            for peer in list(self._peers):
                self._drop(peer)
        self._await_writes()

    def _accept(self, listener: socket.socket) -> None:
        try:
            self._admit(listener.accept()[0])
        except BlockingIOError:
            pass
        except OSError as error:  # no descriptor left; a trainer being served may free one
            print(f"saver: cannot accept a connection: {error}", file=sys.stderr)
            time.sleep(_RETRY_S)

    def _admit(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._peers.append(Peer(sock))
        self._selector.register(sock, selectors.EVENT_READ)

    def _drain(self, peer: Peer) -> None:
        """Handle all requests that have arrived. If the trainer closed the connection, its running save continues."""
        while True:
            try:
                data = peer.sock.recv(protocol.MESSAGE)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                self._drop(peer)
                return
            try:
                self._handle(peer, parse(data))
            except RequestError as error:
                print(f"saver: closing a connection after an invalid request: {str(error)[:200]}", file=sys.stderr)
                self._drop(peer)
                return

    def _drop(self, peer: Peer) -> None:
        self._selector.unregister(peer.sock)
        peer.sock.close()
        self._peers.remove(peer)
        self._keep_image(peer, shared=False)

    def _handle(self, peer: Peer, message: Request) -> None:
        match message:
            case HelloRequest(folder, gen, keep):
                self._hello(peer, folder, gen, keep)
            case ReserveRequest(size):
                self._reserve(peer, size)
            case ImageRequest() as asked:
                self._give(peer, asked)
            case StageRequest() if not self._fence(peer.gen):
                self._memories.staging.staged = None
            case SaveRequest() as save:
                self._finish(peer, save.manifest.commit, partial(self._save, peer.gen, save))
            case PublishRequest(manifest):
                self._finish(peer, manifest.commit, partial(self._publish, manifest))

    def _fence(self, gen: int) -> str:
        """Return why a trainer of this generation is refused; "" if it is accepted."""
        return "" if gen == self._gen else f"generation {gen} is older than generation {self._gen}"

    def _hello(self, peer: Peer, folder: Path, gen: int, keep: int) -> None:
        if gen < self._gen:
            peer.tell({"event": "fenced", "why": self._fence(gen)})
            return
        older = [other for other in self._peers if other is not peer and other.folder]
        for other in older:
            self._keep_image(other, shared=True)
        try:
            if older:
                self._memories.renew()
        except OSError as error:
            peer.fail(Fault.NO_MEMORY, f"staging memory: {error}")
            return
        if folder != self._folder:
            self._memories.drop_parts()
        self._folder = folder
        self._memories.sort_images()
        self._gen, peer.gen, peer.folder, peer.keep = gen, gen, folder, keep
        staged = self._memories.staging.staged
        try:
            folder.mkdir(parents=True, exist_ok=True)
            store.sweep(folder)
            moved = store.quarantine_incomplete(folder, besides=self._handover.written_in(folder))
            if staged is not None and staged.commit not in (*store.complete(folder), *store.partial(folder)):
                staged = None  # pruned, damaged or in another folder: only a checkpoint on disk counts
            kept = self._handover.offer(folder)
        except OSError as error:  # for example, the disk has become read-only
            peer.folder = None
            peer.fail(fault_of(error), f"{folder}: {error}")
            return
        told = [asdict(skipped) for skipped in moved]
        answer: Answer = {"event": "hello", "staged": None, "quarantined": told, "image": None}
        if staged is not None:
            answer["staged"] = staged.to_bytes().decode()
            answer["stretches"] = [asdict(stretch) for stretch in self._memories.staging.stretches]
        if kept is None:
            peer.tell(answer)
            return
        if kept.writing:
            kept.told.append(peer)
        image = {"bytes": kept.memory.size, "shared": kept.shared, "writing": kept.writing}
        answer["image"] = image | {"gen": kept.commit.gen, "step": kept.commit.step}
        peer.tell(answer, kept.memory.fd)

    def _reserve(self, peer: Peer, size: int) -> None:
        if fence := self._fence(peer.gen):
            peer.fail(Fault.FENCED, fence)
            return
        try:
            self._memories.reserve_staging(size)
        except OSError as error:
            too_large = error.errno == errno.EFBIG  # a limit on files, not on memory
            fault = Fault.WRITE_FAILED if too_large else Fault.NO_MEMORY
            peer.fail(fault, f"staging memory: {reason(error)}")
            return
        peer.tell({"event": "buffer", "bytes": self._memories.staging.size}, self._memories.staging.fd)

    def _give(self, peer: Peer, asked: ImageRequest) -> None:
        """Give the trainer a memory for an image."""
        event = "part_image" if asked.part else "image"
        answer: Answer = {"event": event, "number": asked.number, "bytes": 0, "took": False}
        if fence := self._fence(peer.gen):
            peer.tell({**answer, "fault": int(Fault.FENCED), "why": fence})
            return
        memories = self._memories
        try:
            if asked.part:
                memory = memories.part(asked.number, asked.bytes)
            else:
                answer["took"] = memories.allocate_image(asked.number, asked.bytes)
                memory = memories.images[asked.number]
        except OSError as error:
            if asked.part:
                memories.drop_parts()  # the others are of no use alone
            else:
                memories.renew_images(asked.number)  # an image in another one may be a save that is still to be written
            why = f"image memory: {reason(error)}"
            peer.tell({**answer, "took": not asked.part, "fault": int(Fault.NO_MEMORY), "why": why})
            return
        if memory is None:
            peer.tell(answer)
        else:
            peer.tell({**answer, "bytes": memory.size}, memory.fd)

    def _keep_image(self, peer: Peer, *, shared: bool) -> None:
        """Keep the newest image of a trainer that is gone, and begin to write it. ``shared``: it is still connected."""
        if peer.folder is None or peer.gen != self._gen:
            return
        try:
            self._handover.keep(self._memories.images, peer, shared=shared)
        except OSError as error:
            print(f"saver: {peer.folder}: no image is kept: {error}", file=sys.stderr)

    def _end_writes(self) -> None:
        """Tell the trainer which images are on disk now, and drop old checkpoints."""
        for each in self._handover.ended():
            kept, commit = each.kept, each.kept.commit
            trainers, kept.told = [peer for peer in kept.told if peer in self._peers], []
            if isinstance(each.written, Exception):
                print(f"saver: {kept.folder}: image {commit} was not written: {each.written}", file=sys.stderr)
                fault = fault_of(each.written) if isinstance(each.written, OSError) else Fault.WRITE_FAILED
                for peer in trainers:
                    peer.fail(fault, f"{kept.folder}: {each.written}", commit, kept=True)
                continue
            durable = {"event": "durable", "gen": commit.gen, "step": commit.step, "kept": True}
            for peer in trainers:
                peer.tell({**durable, "seconds": each.seconds})
            with contextlib.suppress(OSError):  # retried after the next save
                store.prune(kept.folder, kept.peer.keep)

    def _await_writes(self) -> None:
        self._handover.join()
        self._end_writes()

    def _finish(self, peer: Peer, commit: Commit, write: Callable[[Path], Answer]) -> None:
        """Write a checkpoint or publish a part, report the result, and drop old checkpoints."""
        self._await_writes()
        began, folder = time.monotonic(), peer.folder
        try:
            if folder is None:
                raise _SaveRefusedError(Fault.FENCED, "no hello")
            if fence := self._fence(peer.gen):
                raise _SaveRefusedError(Fault.FENCED, fence)
            answer = write(folder)
        except _SaveRefusedError as error:
            peer.fail(error.fault, str(error), commit)
            return
        except OSError as error:
            peer.fail(fault_of(error), f"{folder}: {reason(error)}", commit)
            return
        except (MemoryError, RuntimeError) as error:  # for example, no thread left; this process continues
            peer.fail(Fault.WRITE_FAILED, f"{folder}: {type(error).__name__}: {error}", commit)
            return
        peer.tell({"gen": commit.gen, "step": commit.step, **answer, "seconds": time.monotonic() - began})
        with contextlib.suppress(OSError):  # retried after the next save
            store.prune(folder, peer.keep)

    def _save(self, gen: int, asked: SaveRequest, folder: Path) -> Answer:
        commit = asked.manifest.commit
        if why := save_refusal(folder, commit, gen):
            raise _SaveRefusedError(Fault.FENCED, why)
        memory = self._memories.staging if asked.image is None else self._memories.images[asked.image]
        if not all(map(memory.covers, asked.stretches)):
            raise RequestError(f"{commit}: a file's bytes are outside the memory")
        check = partial(check_seal, memory, asked.manifest) if asked.image is not None else _no_check
        written = write_checkpoint(folder, asked.manifest, memory, asked.stretches, asked.part, check)
        memory.staged, memory.stretches = written, asked.stretches
        return {"event": "written", "manifest": written.to_bytes().decode()} if asked.part else {"event": "durable"}

    def _publish(self, manifest: Manifest, folder: Path) -> Answer:
        """Write COMMIT with the files of all nodes."""
        try:
            if store.read_part(folder, manifest.commit).files != manifest.files:
                raise ValueError("the manifest to publish lists other files than the written part")
            store.publish(folder / str(manifest.commit), manifest)
        except ValueError as error:
            raise _SaveRefusedError(Fault.WRITE_FAILED, f"{folder}: {error}") from None
        self._memories.drop_left()
        staging = self._memories.staging
        if staging.staged is not None and staging.staged.commit == manifest.commit:
            staging.staged = manifest
        return {"event": "durable"}


def _no_check() -> None:
    """Staging memory has no seal: its trainer changes it only after the saver's answer."""


def _end_with_parent(stop: Callable[..., None]) -> None:
    """End this process once the trainer is gone and the current save is finished.

    Stop signals are ignored, because schedulers send SIGTERM to all processes of a job before the trainer's last save.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, stop)
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)
    if os.getppid() != parent:
        raise SystemExit(0)


def main(argv: list[str] | None = None) -> int:
    """``--socket PATH``: listen there until SIGTERM. ``--fd N``: serve the socket inherited as this descriptor, and end
    with the parent. No argparse, since importing it takes a tenth of the saver's start."""
    where, value = sys.argv[1:] if argv is None else argv
    if where == "--socket":
        try:
            server = SaverServer(listener=protocol.listen(Path(value)))
        except OSError as error:
            print(f"saver: {value}: {error.strerror}", file=sys.stderr)
            return 1
        signal.signal(signal.SIGTERM, server.stop)
        signal.signal(signal.SIGINT, server.stop)
    else:
        server = SaverServer(peer=socket.socket(fileno=int(value)))
        _end_with_parent(server.stop)
    server.serve()
    return 0


def command(path: Path | str, *, python: str = sys.executable) -> list[str]:
    """Return the command that starts a saver at the unix socket ``path``. The saver needs no environment variables."""
    return [python, "-S", __file__, "--socket", str(path)]


if __name__ == "__main__":
    raise SystemExit(main())
