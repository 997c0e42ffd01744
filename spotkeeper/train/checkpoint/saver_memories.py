"""The memory files of one saver: staging memory, images, and parts of sharded state.

A memory that a trainer maps may change as long as the trainer is connected. So once the next trainer says hello, the
older one's memories are given to no other trainer (``renew``). Its images and parts are kept all the same: images by
``handover.py``, sealed parts here, beside the next trainer's memories, until a checkpoint of all machines is on disk.

Standard library only: this runs in the saver.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from spotkeeper.train.checkpoint.durable import Buffer
from spotkeeper.train.checkpoint.handover import Handover
from spotkeeper.train.checkpoint.protocol import IMAGES, LEFT_PARTS
from spotkeeper.train.checkpoint.seal import read_seal
from spotkeeper.train.core.headroom import IMAGE_SHARE


class SaverMemories:
    """The memories. ``await_writes`` waits until no kept image is being written."""

    def __init__(self, handover: Handover, await_writes: Callable[[], None]) -> None:
        self._handover, self._await_writes = handover, await_writes
        self.staging = Buffer()
        self.images = [Buffer() for _ in range(IMAGES)]
        self._parts: dict[int, Buffer] = {}  # images of sharded state; they stay until a later image is complete
        self._left: dict[int, Buffer] = {}  # sealed ones of a trainer that was connected when the next one came

    def renew(self) -> None:
        """Give other memories to the next trainer, because an older one is connected and may write into these.

        Raises:
            OSError: no descriptor is left.
        """
        for old in (self.staging, *self.images):
            if not self._handover.shares(old):
                old.close()
        self.staging, self.images = Buffer(), [Buffer() for _ in range(IMAGES)]
        sealed = {number: each for number, each in self._parts.items() if read_seal(each) is not None}
        for number in self._parts.keys() - sealed.keys():
            self._parts.pop(number).close()
        if sealed:
            self.drop_left()
            self._parts, self._left = {}, sealed

    def sort_images(self) -> None:
        """Order the image memories for a trainer of a new generation, which asks for them by number from 0 on.

        Allocated memories come first, then the kept image, which is being written, but never as number 0. If several
        are allocated and none is the staging memory, one becomes that: the state may arrive from another rank.
        """
        kept = [each for each in self.images if self._handover.holds(each)]
        free = sorted((each for each in self.images if each not in kept), key=lambda each: not each.size)
        if not self.staging.size and len([each for each in free if each.size]) > 1:
            self.staging, free = free[0], [*free[1:], self.staging]
            self.staging.staged = None
        ready = max(1, len([each for each in free if each.size]))
        self.images = [*free[:ready], *kept, *free[ready:]]

    def reserve_staging(self, size: int) -> None:
        """Allocate the staging memory, in place of images if there is no memory for both.

        Raises:
            OSError: no memory, as long as the trainer maps the images.
        """
        try:
            self.staging.reserve(size)
        except OSError:
            self.renew_images()
            self.drop_parts()
            self.staging.reserve(size)

    def allocate_image(self, number: int, size: int) -> bool:
        """Allocate an image memory; return whether it takes over the staging memory.

        It does so if all other image memories exist, so that there are three memories in all, or if the node has no
        memory for one more.

        Raises:
            OSError: no memory.
        """
        self._handover.release()
        image, others = self.images[number], [each for at, each in enumerate(self.images) if at != number]
        if self._handover.writes(image):
            self._await_writes()
        if image.size or not self.staging.size:
            image.reserve(size, IMAGE_SHARE)
            return False
        if not all(other.size for other in others):
            with contextlib.suppress(OSError):
                image.reserve(size, IMAGE_SHARE)
                return False
        self.images[number], self.staging = self.staging, image
        self.images[number].staged = None
        self.images[number].reserve(size)
        return True

    def renew_images(self, first: int = 0) -> None:
        """Free the images' memory from number ``first`` on, once the trainer unmaps it too."""
        for number, old in enumerate(self.images):
            if old.size and number >= first:
                if self._handover.writes(old):
                    self._await_writes()
                self._handover.forget(old)
                with contextlib.suppress(OSError):  # no descriptor left
                    self.images[number] = Buffer()
                    old.close()

    def part(self, number: int, size: int) -> Buffer | None:
        """Return a memory of sharded state with at least ``size`` bytes; None if ``size`` is 0 and it does not exist.

        Raises:
            OSError: no memory.
        """
        if not size:
            return self._left.get(number - LEFT_PARTS) if number >= LEFT_PARTS else self._parts.get(number)
        memory = self._parts[number] if number in self._parts else self._parts.setdefault(number, Buffer())
        try:
            memory.reserve(size)
        except OSError:
            if not self._left:
                raise
            self.drop_left()
            memory.reserve(size)
        return memory

    def drop_parts(self) -> None:
        """Free the memories of sharded state, once the trainer unmaps them too."""
        self.drop_left()
        for memory in self._parts.values():
            memory.close()
        self._parts.clear()

    def drop_left(self) -> None:
        """Free what a trainer that was still connected left."""
        for memory in self._left.values():
            memory.close()
        self._left.clear()
