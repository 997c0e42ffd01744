"""What a trainer asks of its saver: staging memory, memories for images, saves and their results.

Standard library only, like the saver. ``saver.py`` has the table of messages, ``connection.py`` carries them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import subprocess
import threading
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spotkeeper.train.agent_link.control import Commit, Fault
from spotkeeper.train.checkpoint.connection import Limit, SaverConnection
from spotkeeper.train.checkpoint.durable import CopyOnWrite, MemoryHandle, map_shared, round_up
from spotkeeper.train.checkpoint.manifest import Manifest, RankPlace
from spotkeeper.train.checkpoint.memories import ImageMemories, PartMemories
from spotkeeper.train.checkpoint.protocol import (
    Event,
    OfferedImage,
    PartWritten,
    SaveDurable,
    SaveFailed,
    SaverError,
    SaverState,
    Stretch,
)
from spotkeeper.train.checkpoint.store import SkippedCheckpoint


class Client(SaverConnection):
    """A trainer's connection to its node's saver. Not thread-safe."""

    def __init__(
        self, sock: socket.socket, process: subprocess.Popen[bytes] | None = None, limit: Limit = lambda: None
    ) -> None:
        self._events: deque[Event] = deque()
        self._pending: Commit | None = None
        self._kept: Commit | None = None  # image of an earlier trainer that the saver writes; it will tell the result
        self._reserving = False
        self._refused: SaverError | None = None  # error of the last request for memory
        self._fd = -1
        self._size = 0
        self._map: mmap.mmap | None = None
        self._offer: CopyOnWrite | None = None  # image of an earlier trainer, of which optimizers keep parts
        self._owning: threading.Thread | None = None
        self.images = ImageMemories(self._request)
        self.parts = PartMemories(self._request)
        super().__init__(sock, process, limit)  # last: a fork of another thread may forget this connection at once

    def close(self) -> None:
        """Close the connection; the saver finishes a running save.

        If this client started the saver, wait for its end; kill it if it hangs.
        """
        self._hang_up()
        self._drop_map()
        self.images.drop()
        self.parts.drop()
        self._close_fd()
        self._await_end()

    def _forget(self) -> None:
        super()._forget()
        self._close_fd()

    def _close_fd(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def pending(self) -> Commit | None:
        """The save, or the earlier trainer's image, whose result was not returned yet, or None."""
        return self._pending or self._kept

    @property
    def fd(self) -> int:
        """Descriptor of the staging memory; -1 before it exists."""
        return self._fd

    def hello(self, folder: Path, gen: int, keep: int) -> SaverState:
        """Announce a generation. Returns after the saver has finished the save of an older generation.

        It does not wait for the write of an image that an older generation left; ``poll`` and ``wait`` tell the result.

        Raises:
            SaverError: FENCED if a newer generation has announced itself; SAVER_LOST if the saver is gone; another
                fault if the saver cannot use the folder.
        """
        self._request({"op": "hello", "folder": str(folder.absolute()), "gen": gen, "keep": keep})
        answer = self._answer("hello", "fenced")
        if answer["event"] == "fenced":
            raise SaverError(Fault.FENCED, answer["why"])
        staged = None if answer["staged"] is None else Manifest.from_bytes(answer["staged"].encode())
        kept = answer["image"]
        if kept is not None and kept["writing"]:
            self._kept = Commit(kept["gen"], kept["step"])
        self._offer = kept and _map_offer(answer["fds"], kept["bytes"])
        offered = None
        if self._offer is not None:
            offered = OfferedImage(memoryview(self._offer), kept["shared"], kept["writing"], self._offer.ownable)
        return SaverState(
            staged,
            tuple(Stretch(**part) for part in answer.get("stretches", ())),
            tuple(SkippedCheckpoint(**part) for part in answer["quarantined"]),
            offered,
        )

    def own_offer(self) -> None:
        """Begin to copy what optimizers keep of the offered image, in a thread, while training begins."""
        if self._offer is not None and self._owning is None:
            thread = threading.Thread(target=self._own_offer, name="spotkeeper-own", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread left: ``_settle_offer`` copies
                thread.start()
                self._owning = thread

    def _own_offer(self) -> None:
        if self._offer is not None:
            with contextlib.suppress(OSError):  # ``_settle_offer`` tries again
                self._offer.own()

    def _settle_offer(self) -> None:
        """Keep nothing of the offered image's memory, which will have another image.

        Raises:
            SaverError: NO_MEMORY.
        """
        if self._offer is None:
            return
        if self._owning is not None:
            self._owning.join()
        try:
            self._offer.own()
        except OSError as error:
            raise SaverError(Fault.NO_MEMORY, f"an earlier trainer's image: {error}") from None
        self._offer = self._owning = None

    def reserve(self, size: int) -> None:
        """Request staging memory of ``size`` bytes, without waiting for the answer."""
        if size > self._size and not self._reserving:
            self._request({"op": "reserve", "bytes": round_up(size)})
            self._reserving = True

    def memory(self, size: int) -> mmap.mmap:
        """Return a mapping of at least ``size`` bytes of the staging memory. What was staged before is still there.

        Raises:
            SaverError: NO_MEMORY, or the saver is gone.
        """
        self._settle_offer()
        self._await_memory()  # requested by ``warm``
        if size > self._size or self._fd < 0:
            self.reserve(max(size, 1))
            self._await_memory()
            if self._refused is not None:
                raise self._refused
        try:
            if self._map is None:
                self._map = map_shared(self._fd, self._size)
        except OSError as error:
            raise SaverError(Fault.NO_MEMORY, f"staging memory: {error}") from None
        return self._map

    def next_image(self) -> int | None:
        """Return the number of the image memory to fill next; None if none is free or the saver still allocates it.

        Raises:
            SaverError: the saver is gone.
        """
        self._read_all()
        number = self.images.next()
        return None if number is None or self.images.awaits(number) else number

    def image(self, number: int, size: int, *, wait: bool = False) -> memoryview | None:
        """Return an image memory (``seal.py``) for ``size`` bytes and the seal; None until the saver has allocated it.

        With ``wait``, wait for the saver's answer. Then None means that it refuses a third memory.

        Raises:
            SaverError: NO_MEMORY, or the saver is gone.
        """
        self._settle_offer()
        self._read_all()
        memory = self.images.open(number, size)
        pulse = self._pulse()
        while wait and memory is None and self.images.awaits(number):
            if self._read_soon() is None:
                self._need(pulse)
            memory = self.images.open(number, size)
        return memory

    def part_image(self, number: int, size: int) -> memoryview | None:
        """Return a memory for an image of sharded state, as ``image`` does.

        Raises:
            SaverError: NO_MEMORY, or the saver is gone.
        """
        self._settle_offer()
        self._read_all()
        return self.parts.open(number, size)

    def kept_part(self, number: int) -> MemoryHandle | None:
        """Return a memory for an image of sharded state as an earlier generation left it; None: the saver has none.

        Raises:
            SaverError: the saver is gone or refuses.
        """
        self.parts.request(number, 0)
        while self._answer("part_image")["number"] != number:
            pass
        return self.parts.handle(number)

    def stage(self, size: int) -> mmap.mmap:
        """Return the staging memory for the next checkpoint. The memory's former checkpoint then exists on disk only.

        Raises:
            SaverError: a save is running (call ``wait`` first), NO_MEMORY, or the saver is gone.
        """
        if self._pending is not None:
            raise SaverError(Fault.WRITE_FAILED, f"checkpoint {self._pending} is not durable yet: call wait() first")
        memory = self.memory(size)
        self._request({"op": "stage"})
        return memory

    def save(
        self, manifest: Manifest, stretches: tuple[Stretch, ...], *, part: bool = False, image: int | None = None
    ) -> None:
        """Request that the staged bytes become durable. Returns at once; ``poll`` or ``wait`` return the result.

        Args:
            manifest: the checkpoint.
            stretches: the bytes of each file.
            part: whether the bytes are this node's part of sharded state; the checkpoint is then complete only after
                ``publish``.
            image: number of the image memory that has the bytes, sealed with this manifest; None: staging memory.
        """
        message = {
            "op": "save",
            "manifest": manifest.to_bytes().decode(),
            "stretches": [asdict(stretch) for stretch in stretches],
            "part": part,
        }
        self._request(message if image is None else message | {"image": image})
        self._pending, self.images.writing = manifest.commit, image

    def publish(self, manifest: Manifest) -> None:
        """Request that the saver write ``manifest``, which lists all nodes' files, as COMMIT beside a written part."""
        self._request({"op": "publish", "manifest": manifest.to_bytes().decode()})
        self._pending = manifest.commit

    def poll(self) -> Event | None:
        """Return a save's result, once; None without a new result. Takes a microsecond while no save runs."""
        while self.pending is not None and not self._events:
            if self._read(block=False) is None:
                break
        return self._result()

    def wait(self, timeout_s: float | None = None) -> Event | None:
        """Wait for the running save and return its result; None if no save runs or the time is up.

        Raises:
            SaverError: the saver is gone or silent.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        pulse = self._pulse()
        while self.pending is not None and not self._events:
            if end is not None and time.monotonic() >= end:
                return None
            if self._read_soon(end) is None:
                self._need(pulse)
        return self._result()

    def _result(self) -> Event | None:
        if not self._events:
            return None
        event = self._events.popleft()
        if isinstance(event, PartWritten) or not event.kept:
            self._pending = self.images.writing = None
        else:
            self._kept = None
        return event

    def _await_memory(self) -> None:
        """Wait until the saver has answered every request for memory; ``_refused`` has the error, if any."""
        pulse = self._pulse()
        while self._reserving:
            if self._read_soon() is None:
                self._need(pulse)

    def _forget_staging(self) -> None:
        """Note that the staging memory has become an image memory."""
        self._drop_map()
        self._size = 0
        self._close_fd()

    def _drop_map(self) -> None:
        """Unmap the memory, unless tensors still use it; then it is unmapped once they are gone."""
        if self._map is not None:
            with contextlib.suppress(BufferError):  # tensors still use it
                self._map.close()
            self._map = None

    def _receive(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        if message["event"] == "image":
            self.images.note(message, fds)
            if message["took"]:
                self._forget_staging()
            return message
        if message["event"] == "part_image":
            self.parts.note(message, fds)
            return message
        if message["event"] == "hello":
            return message | {"fds": fds}
        for fd in fds:
            self._close_fd()
            self._fd = fd
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        if "gen" not in message:
            self._note_memory(message)
            return
        commit, kept = Commit(message["gen"], message["step"]), message.get("kept", False)
        if message["event"] == "durable":
            self._events.append(SaveDurable(commit, message["seconds"], kept))
        elif message["event"] == "written":
            manifest = Manifest.from_bytes(message["manifest"].encode())
            self._events.append(PartWritten(commit, manifest, message["seconds"]))
        else:
            self._events.append(SaveFailed(commit, Fault(message["fault"]), message["why"], kept))

    def _note_memory(self, message: dict[str, Any]) -> None:
        if not self._reserving or message["event"] not in ("buffer", "failed"):
            return
        self._reserving, self._refused = False, None
        if message["event"] == "failed":
            self._refused = SaverError(Fault(message["fault"]), message["why"])
            self.images.refuse(self._refused)
            self.parts.refuse(self._refused)
        elif self._fd < 0:
            self._refused = SaverError(Fault.NO_MEMORY, "staging memory: this process has no file descriptor left")
        elif message["bytes"] != self._size:
            self._drop_map()
            self._size = message["bytes"]

    def _forget_save(self) -> Commit | None:
        pending, self._pending, self._kept, self.images.writing = self.pending, None, None, None
        self._reserving = False
        return pending


def _map_offer(fds: list[int], size: int) -> CopyOnWrite | None:
    """Map the image that the saver offers, and close ``fds``; None without a descriptor or memory."""
    try:
        return CopyOnWrite(fds[0], size) if fds else None
    except OSError:
        return None
    finally:
        for fd in fds:
            os.close(fd)


def new_manifest(commit: Commit, gang: tuple[RankPlace, ...], versions: dict[str, str]) -> Manifest:
    """Return a manifest without files; the saver adds them as it hashes them."""
    return Manifest(commit, len(gang), gang, (), versions, time.time())
