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
from typing import Any

from spotkeeper.train.agent_link.control import Fault
from spotkeeper.train.checkpoint.durable import MemoryHandle, map_shared, round_up
from spotkeeper.train.checkpoint.protocol import IMAGES, SaverError
from spotkeeper.train.checkpoint.seal import AREA


class ImageMemories:
    """The image memories of one connection. ``request`` sends a message to the saver."""

    def __init__(self, request: Callable[[dict[str, Any]], None]) -> None:
        self._request = request
        self._maps: dict[int, mmap.mmap] = {}
        self._requested: set[int] = set()  # numbers that the saver has not answered for
        self.limited: SaverError | None = None  # why the saver refused the third memory
        self.refused: SaverError | None = None  # why it refused any other memory: no images then
        self.newest: int | None = None  # number of the memory that has the newest complete image
        self.writing: int | None = None  # number of the memory that the saver is writing to disk

    def next(self) -> int | None:
        """Return the number of the memory to fill next, or None if each holds the newest image or one being written."""
        count = IMAGES if self.limited is None else IMAGES - 1
        free = [number for number in range(count) if number not in (self.newest, self.writing)]
        return min(free, key=lambda number: (number not in self._maps, number), default=None)

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
        if number not in self._requested and (self.limited is None or number < IMAGES - 1):
            self._request({"op": "image", "number": number, "bytes": round_up(size) + AREA})
            self._requested.add(number)
        return None

    def note(self, message: dict[str, Any], fds: list[int]) -> None:
        """Process the saver's answer to a request for a memory; close ``fds``."""
        number: int = message["number"]
        self._requested.discard(number)
        try:
            if not message["bytes"]:
                self._note_refusal(number, SaverError(Fault(message["fault"]), message["why"]))
            elif not fds:
                self.refused = SaverError(Fault.NO_MEMORY, "image memory: this process has no file descriptor left")
            else:
                self._maps[number] = map_shared(fds[0], message["bytes"])
        except OSError as error:
            self.refused = SaverError(Fault.NO_MEMORY, f"image memory: {error}")
        finally:
            for fd in fds:
                os.close(fd)

    def _note_refusal(self, number: int, error: SaverError) -> None:
        if number == IMAGES - 1 and error.fault is Fault.NO_MEMORY:
            self.limited = error
        else:
            self.refuse(error)

    def refuse(self, error: SaverError) -> None:
        """Note that the saver has freed all image memories."""
        self.refused = error
        self.drop()

    def drop(self) -> None:
        for memory in self._maps.values():
            with contextlib.suppress(BufferError):  # tensors still use it
                memory.close()
        self._maps.clear()
        self.newest = self.writing = None


class PartMemories:
    """The memories of one connection for images of sharded state (``peers.py``)."""

    def __init__(self, request: Callable[[dict[str, Any]], None]) -> None:
        self._request = request
        self._files: dict[int, tuple[int, mmap.mmap]] = {}
        self._requested: set[int] = set()
        self.refused: SaverError | None = None  # why the saver refused a memory

    def open(self, number: int, size: int) -> memoryview | None:
        """Return a memory for ``size`` bytes and the seal; request it and return None if it is not allocated yet.

        Raises:
            SaverError: NO_MEMORY, or the saver is gone.
        """
        if self.refused is not None:
            raise self.refused
        if number in self._files and len(self._files[number][1]) >= size + AREA:
            return memoryview(self._files[number][1])
        if number not in self._requested:
            self.request(number, round_up(size) + AREA)
        return None

    def request(self, number: int, size: int) -> None:
        """Request a memory of ``size`` bytes; 0: as it is."""
        self._request({"op": "part_image", "number": number, "bytes": size})
        self._requested.add(number)

    def handle(self, number: int) -> MemoryHandle | None:
        """Return what other processes of this user need to open a memory; None if it is not allocated."""
        if number not in self._files:
            return None
        fd, memory = self._files[number]
        return MemoryHandle(os.getpid(), fd, len(memory))

    def note(self, message: dict[str, Any], fds: list[int]) -> None:
        """Process the saver's answer to a request."""
        number: int = message["number"]
        self._requested.discard(number)
        if "fault" in message:
            self.refuse(SaverError(Fault(message["fault"]), message["why"]))
        elif not fds:
            self.refuse(SaverError(Fault.NO_MEMORY, "image memory: this process has no file descriptor left"))
        elif message["bytes"]:
            self._drop(number)
            try:
                memory = map_shared(fds[0], message["bytes"])
                self._files[number] = fds.pop(), memory
            except OSError as error:
                self.refuse(SaverError(Fault.NO_MEMORY, f"image memory: {error}"))
        for fd in fds:
            os.close(fd)

    def refuse(self, error: SaverError) -> None:
        """Note that the saver has freed all these memories."""
        self.refused = error
        self.drop()

    def drop(self) -> None:
        for number in list(self._files):
            self._drop(number)

    def _drop(self, number: int) -> None:
        if number in self._files:
            fd, memory = self._files.pop(number)
            os.close(fd)
            with contextlib.suppress(BufferError):  # tensors still use it
                memory.close()
