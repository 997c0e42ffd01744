"""The seal of an image in the saver's memory: it proves that the image is complete, and names its step and files.

An image memory ends with ``AREA`` bytes for the seal::

    32 bytes   SHA-256 of the text
     8 bytes   length of the text
    text       JSON: the manifest, still without files, and the stretches

The trainer breaks the seal before it changes the image, and seals the image once it is complete. So a trainer that is
killed at any moment leaves an image that is complete or has no seal. Standard library only: the saver reads seals.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass

from spotkeeper.train.checkpoint.durable import PAGE, Buffer, private_memory, round_up
from spotkeeper.train.checkpoint.manifest import Manifest
from spotkeeper.train.checkpoint.protocol import RequestError, SaveRequest, Stretch, parse

AREA = 1 << 20  # bytes; a request to save has the same limit
_HEADER = 40


@dataclass(frozen=True)
class Seal:
    """What a sealed image holds. ``digest`` changes with every image. ``part``: one machine's part of sharded state."""

    manifest: Manifest
    stretches: tuple[Stretch, ...]
    digest: bytes
    part: bool = False


def break_seal(memory: memoryview) -> None:
    """Mark the image as incomplete, before any of its bytes change."""
    at = len(memory) - AREA
    memory[at : at + _HEADER] = bytes(_HEADER)


def seal(memory: memoryview, manifest: Manifest, stretches: tuple[Stretch, ...], *, part: bool = False) -> bool:
    """Mark the image as complete. Returns False if the seal does not fit, for a gang of more than 5,000 ranks.

    ``part``: whether the image is one machine's part of sharded state.
    """
    files = [asdict(each) for each in stretches]
    save = {"op": "save", "manifest": manifest.to_bytes().decode(), "stretches": files, "part": part}
    text = json.dumps(save).encode()
    at = len(memory) - AREA
    if _HEADER + len(text) > AREA:
        return False
    memory[at + _HEADER : at + _HEADER + len(text)] = text
    memory[at : at + _HEADER] = hashlib.sha256(text).digest() + len(text).to_bytes(8, "little")
    return True


def read_seal(buffer: Buffer) -> Seal | None:
    """Return the seal of a complete image, or None."""
    return _seal(buffer.size, lambda at, count: os.pread(buffer.fd, count, at))


def check_seal(image: Buffer, manifest: Manifest) -> None:
    """Check that the memory still has this image, complete: its trainer may have filled it again.

    Raises:
        RuntimeError: it has not.
    """
    sealed = read_seal(image)
    if sealed is None or sealed.manifest != manifest:
        raise RuntimeError("the image changed while it was written")


def seal_of(memory: memoryview) -> Seal | None:
    """Return the seal of a complete image in a mapped memory, or None."""
    return _seal(len(memory), lambda at, count: bytes(memory[at : at + count]))


def read_sealed(memory: memoryview, sealed: Seal, at: int, count: int, *, shared: bool) -> memoryview:
    """Return ``count`` bytes of a sealed image from offset ``at``. ``shared``: its trainer may change it; so copy them.

    Raises:
        ValueError: the trainer has changed the image.
    """
    there = memory[at : at + count]
    if not shared:
        return there
    copy = private_memory(count)
    copy[:] = there
    if seal_of(memory) != sealed:
        raise ValueError("it changed while it was read")
    return copy


def _seal(size: int, read: Callable[[int, int], bytes]) -> Seal | None:
    at = size - AREA
    if at < PAGE:
        return None
    header = read(at, _HEADER)
    length = int.from_bytes(header[32:], "little")
    if not 0 < length <= AREA - _HEADER:
        return None
    text = read(at + _HEADER, length)
    if hashlib.sha256(text).digest() != header[:32]:
        return None
    try:
        save = parse(text)
    except RequestError:
        return None
    if not isinstance(save, SaveRequest) or not all(
        each.offset % PAGE == 0 and each.offset + max(PAGE, round_up(each.bytes)) <= at for each in save.stretches
    ):
        return None
    return Seal(save.manifest, save.stretches, header[:32], save.part)
