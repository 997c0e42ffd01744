"""Hands the newest image of a trainer that is gone to the next trainer, and writes it to disk meanwhile.

**Rules.**

1. Once a trainer's connection has ended, or a trainer of a newer generation says hello, its newest sealed image is
   *kept*, unless the disk has a newer checkpoint. A thread writes the image; writes follow each other.
2. A hello never waits for such a write: the next trainer may restore the image from memory at once. (It does wait for
   a save that the older trainer requested, see ``saver.py``.) But the image is a checkpoint only once its COMMIT is on
   disk, and it is then offered only as long as the disk still has it.
3. If an older trainer is still connected, it may write into its memory at any time. So the next trainer gets other
   memories, and copies a kept image before it trusts the seal (``LeftImage.shared``).
4. A memory whose image is being written is given to no trainer before the write has ended.
5. An image is kept until it is a checkpoint or a newer one is kept: the next trainer may be lost before it has one.

Standard library only: this runs in the saver.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from spotkeeper.train.agent_link.control import Commit
from spotkeeper.train.checkpoint import store
from spotkeeper.train.checkpoint.durable import Buffer, save_refusal, write_checkpoint
from spotkeeper.train.checkpoint.manifest import Manifest
from spotkeeper.train.checkpoint.protocol import Peer
from spotkeeper.train.checkpoint.seal import Seal, check_seal, read_seal


@dataclass(eq=False)
class LeftImage:
    """The newest image of a trainer that is gone."""

    memory: Buffer
    seal: Seal
    peer: Peer  # its trainer's connection
    folder: Path
    shared: bool  # the trainer was still connected: it may change the memory
    durable: bool = False  # COMMIT is on disk
    writing: bool = False
    trained_on: bool = False  # the next trainer needs it no more
    told: list[Peer] = field(default_factory=list)  # trainers to tell of the write's end

    @property
    def commit(self) -> Commit:
        return self.seal.manifest.commit

    @property
    def intact(self) -> bool:
        """Whether the memory still has this image, complete."""
        return read_seal(self.memory) == self.seal


@dataclass(frozen=True)
class ImageWrite:
    """The end of the write of a kept image: the manifest with hashes, or the error."""

    kept: LeftImage
    written: Manifest | Exception
    seconds: float


class Handover:
    """The image that a saver keeps, and the writes of kept images. ``wake`` is called in a thread when a write ends."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._kept: LeftImage | None = None
        self._running: list[LeftImage] = []
        self._thread: threading.Thread | None = None  # of the last write
        self._ended: SimpleQueue[ImageWrite] = SimpleQueue()

    def keep(self, memories: Sequence[Buffer], peer: Peer, *, shared: bool) -> None:
        """Keep the newest sealed image of a trainer that is gone, and begin to write it.

        Raises:
            OSError: the disk cannot be read.
        """
        sealed = [
            (found.manifest.commit, number, found)
            for number, memory in enumerate(memories)
            if (found := read_seal(memory)) and found.manifest.commit.gen == peer.gen
        ]
        if not sealed or peer.folder is None:
            return
        commit, number, newest = max(sealed, key=lambda each: each[:2])
        memory = memories[number]
        if self._kept is not None and self._kept.memory is memory and self._kept.seal == newest:
            return  # its trainer had lost only its connection
        kept = LeftImage(memory, newest, peer, peer.folder, shared)
        there = store.complete(peer.folder)
        if commit < max(there, default=commit):
            return
        kept.durable = commit in there
        if kept.durable or self._begin(kept):
            old, self._kept = self._kept, kept
            if old is not None:
                self._free(old)

    def offer(self, folder: Path) -> LeftImage | None:
        """Return the kept image if a trainer with this folder may restore it. A write that has failed begins again.

        Raises:
            OSError: the disk cannot be read.
        """
        kept = self._kept
        if kept is None or kept.folder != folder or not kept.intact:
            return None
        if kept.durable:
            return kept if kept.commit in store.complete(folder) else None
        return kept if kept.writing or self._begin(kept) else None

    def holds(self, memory: Buffer) -> bool:
        """Whether ``memory`` has the kept image."""
        return self._kept is not None and self._kept.memory is memory

    def shares(self, memory: Buffer) -> bool:
        """Keep the image in ``memory``, if it is the kept one, as one that an older trainer may still change."""
        if self._kept is not None and self.holds(memory):
            self._kept.shared = True
        return self.holds(memory)

    def writes(self, memory: Buffer) -> bool:
        """Whether the image in ``memory`` is being written."""
        return any(kept.memory is memory for kept in self._running)

    def written_in(self, folder: Path) -> list[Commit]:
        """Return the checkpoints that are being written in ``folder``: incomplete, but not left by a crash."""
        return [kept.commit for kept in self._running if kept.folder == folder]

    def release(self) -> None:
        """Free the kept image's memory if no trainer fills it again, now or once it is on disk.

        Called once the next trainer trains.
        """
        kept = self._kept
        if kept is not None and kept.shared:
            kept.trained_on = True
            if kept.durable:
                self._kept = None
                self._free(kept)

    def forget(self, memory: Buffer) -> None:
        """Keep the image in ``memory`` no longer, because the memory is about to be freed."""
        if self.holds(memory):
            self._kept = None

    def join(self) -> None:
        """Wait for all writes."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def ended(self) -> Iterator[ImageWrite]:
        """Yield the writes that have ended."""
        with contextlib.suppress(Empty):
            while True:
                write = self._ended.get_nowait()
                kept = write.kept
                self._running.remove(kept)
                kept.writing = False
                if isinstance(write.written, Manifest):
                    kept.durable = True
                    kept.memory.staged, kept.memory.stretches = write.written, kept.seal.stretches
                    if kept is self._kept and kept.shared and kept.trained_on:
                        self._kept = None
                self._free(kept)
                yield write

    def _free(self, kept: LeftImage) -> None:
        """Close an image's memory if no trainer fills it again, and it is neither kept nor written."""
        if kept.shared and kept is not self._kept and not kept.writing:
            kept.memory.close()

    def _begin(self, kept: LeftImage) -> bool:
        """Begin to write an image; return False if its generation may not write to the disk any more."""
        if save_refusal(kept.folder, kept.commit, kept.peer.gen):
            return False
        kept.writing = True
        self._running.append(kept)
        before = self._thread
        thread = threading.Thread(target=self._write, args=(kept, before), name="image")
        try:
            thread.start()
            self._thread = thread
        except RuntimeError:  # no thread left
            self._write(kept, before)
        return True

    def _write(self, kept: LeftImage, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        began = time.monotonic()
        written: Manifest | Exception
        try:
            written = write_kept(kept)
        except (OSError, MemoryError, RuntimeError) as error:
            written = error
        self._ended.put(ImageWrite(kept, written, time.monotonic() - began))
        self._wake()


def write_kept(kept: LeftImage) -> Manifest:
    """Write an image; return the manifest with hashes.

    Raises:
        OSError, MemoryError: the disk fails, or no memory is left.
        RuntimeError: the trainer has changed the image, because it has lost only its connection; or no thread is left.
    """
    manifest = kept.seal.manifest
    check = partial(check_seal, kept.memory, manifest)
    return write_checkpoint(kept.folder, manifest, kept.memory, kept.seal.stretches, False, check)
