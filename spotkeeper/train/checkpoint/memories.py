"""A trainer's image memories: which of them the saver has allocated, and which one the next image fills.

With three memories, one is being written to disk, one has the newest complete image, and one is being filled. With two,
no image is made while a third would be needed, so the images' spacing follows the disk. Images of sharded state have
memories of their own. Standard library only.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable
from typing import Any, Literal

from spotkeeper.train.agent_link.control import Fault
from spotkeeper.train.checkpoint.durable import MemoryHandle, map_shared, round_up
from spotkeeper.train.checkpoint.protocol import IMAGES, LEFT_PARTS, SaverError
from spotkeeper.train.checkpoint.seal import AREA

_SPARE = 1 << 20  # bytes: small parts grow from image to image, and a memory that is too small costs one


class MappedMemories:
    """Numbered memories of one connection, which the saver allocates. ``send`` sends a message to the saver."""

    op: Literal["image", "part_image"]

    def __init__(self, send: Callable[[dict[str, Any]], None]) -> None:
        self._send = send
        self._maps: dict[int, mmap.mmap] = {}
        self._requested: set[int] = set()  # numbers that the saver has not answered for
        self.refused: SaverError | None = None  # why it refused a memory: no images then

    def awaits(self, number: int) -> bool:
        """Whether the saver has not answered the request for this memory yet."""
        return number in self._requested

    def open(self, number: int, size: int) -> memoryview | None:
        """Return a memory for ``size`` bytes and the seal; request it and return None if it is not allocated yet.

        Raises:
            SaverError: NO_MEMORY, or the saver is gone.
        """
        if self.refused is not None:
            raise self.refused
        memory = self._maps.get(number)
        if memory is not None and len(memory) >= size + AREA:
            return memoryview(memory)
        if not self.awaits(number):
            self.request(number, round_up(size) + _SPARE + AREA)
        return None

    def request(self, number: int, size: int) -> None:
        """Request a memory of ``size`` bytes; 0: as it is."""
        self._send({"op": self.op, "number": number, "bytes": size})
        self._requested.add(number)

    def note(self, message: dict[str, Any], fds: list[int]) -> None:
        """Process the saver's answer to a request for a memory; close ``fds``, or keep them."""
        number: int = message["number"]
        self._requested.discard(number)
        try:
            if "fault" in message:
                self._note_refusal(number, SaverError(Fault(message["fault"]), message["why"]))
            elif message["bytes"] and not fds:
                self.refuse(SaverError(Fault.NO_MEMORY, "image memory: this process has no file descriptor left"))
            elif message["bytes"]:
                self._drop(number)
                self._maps[number] = map_shared(fds[0], message["bytes"])
                self._keep(number, fds)
        except OSError as error:
            self.refuse(SaverError(Fault.NO_MEMORY, f"image memory: {error}"))
        finally:
            for fd in fds:
                os.close(fd)

    def _keep(self, number: int, fds: list[int]) -> None:
        """Take the descriptors to keep out of ``fds``."""

    def _note_refusal(self, number: int, error: SaverError) -> None:
        self.refuse(error)

    def refuse(self, error: SaverError) -> None:
        """Note that no memory can be used, for example because the saver has freed all of them."""
        self.refused = error
        self.drop()

    def drop(self) -> None:
        for number in list(self._maps):
            self._drop(number)

    def _drop(self, number: int) -> None:
        if (memory := self._maps.pop(number, None)) is not None:
            with contextlib.suppress(BufferError):  # tensors still use it
                memory.close()


class ImageMemories(MappedMemories):
    """The memories for images of replicated state."""

    op = "image"

    def __init__(self, send: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(send)
        self.limited: SaverError | None = None  # why the saver refused the third memory
        self.newest: int | None = None  # number of the memory that has the newest complete image
        self.writing: int | None = None  # number of the memory that the saver is writing to disk

    def next(self) -> int | None:
        """Return the number of the memory to fill next, or None if each holds the newest image or one being written."""
        count = IMAGES if self.limited is None else IMAGES - 1
        free = [number for number in range(count) if number not in (self.newest, self.writing)]
        return min(free, key=lambda number: (number not in self._maps, number), default=None)

    def request(self, number: int, size: int) -> None:
        if self.limited is None or number < IMAGES - 1:
            super().request(number, size)

    def _note_refusal(self, number: int, error: SaverError) -> None:
        if number == IMAGES - 1 and error.fault is Fault.NO_MEMORY:
            self.limited = error
        else:
            self.refuse(error)

    def drop(self) -> None:
        super().drop()
        self.newest = self.writing = None


class PartMemories(MappedMemories):
    """The memories for images of sharded state (``peers.py``), which other processes of this user open too."""

    op = "part_image"

    def __init__(self, send: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(send)
        self._fds: dict[int, int] = {}

    def handle(self, number: int) -> MemoryHandle | None:
        """Return what other processes need to open a memory; None if it is not allocated."""
        if number not in self._maps:
            return None
        return MemoryHandle(os.getpid(), self._fds[number], len(self._maps[number]))

    def drop_left(self) -> None:
        """Unmap the images of a trainer that was still connected at ``hello``."""
        for number in range(LEFT_PARTS, 2 * LEFT_PARTS):
            self._drop(number)

    def _keep(self, number: int, fds: list[int]) -> None:
        self._fds[number] = fds.pop(0)

    def _drop(self, number: int) -> None:
        super()._drop(number)
        if number in self._fds:
            os.close(self._fds.pop(number))
