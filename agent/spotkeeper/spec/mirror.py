"""A copy of a checkpoint in the bucket: how it lies there, and the list that says that a rank's part is whole.

::

    jobs/<job>/ckpt/<gen>-<step>/<rank>/<file>       what the rank's disk has of it, but COMMIT, byte for byte
    jobs/<job>/ckpt/<gen>-<step>/<rank>/<file>.part-<nnnnn>   instead, where the file is larger than one part
    jobs/<job>/ckpt/<gen>-<step>/<rank>.json         :class:`MirrorList`, written last and create-only

A list that is there is whole, and so is every part it names. Of replicated state one rank's part is all; of sharded
state the list says whose parts make a whole. Nothing here depends on what is in the files. Holds no reading and no
writing.
"""

from __future__ import annotations

from msgspec import Struct

PART_BYTES = 64 << 20  # of one object: what is sent again when a machine goes, and what a reader holds at most


class MirrorFile(Struct, frozen=True, forbid_unknown_fields=True):
    """``name``: in the checkpoint's folder. ``sha256``: in hex, as COMMIT has it."""

    name: str
    size: int
    sha256: str


class MirrorList(Struct, frozen=True, forbid_unknown_fields=True):
    """``jobs/<job>/ckpt/<gen>-<step>/<rank>.json``."""

    gen: int
    step: int
    rank: int
    whole: tuple[int, ...]  # the ranks whose parts make a whole
    files: tuple[MirrorFile, ...]
    commit: str  # the content of the checkpoint's own COMMIT file, as text
    saved_at: float  # when it was saved, real unix seconds, as COMMIT has it
    part_bytes: int = PART_BYTES

    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def folder(job: str) -> str:
    """All copies of a job."""
    return f"jobs/{job}/ckpt/"


def list_name(job: str, commit: str, rank: int) -> str:
    """``commit``: ``<gen>-<step>``."""
    return f"{folder(job)}{commit}/{rank}.json"


def part_names(job: str, commit: str, rank: int, file: MirrorFile, part_bytes: int = PART_BYTES) -> tuple[str, ...]:
    """The objects that hold a file, in order. An empty file is one, empty, object."""
    name = f"{folder(job)}{commit}/{rank}/{file.name}"
    if file.size <= part_bytes:
        return (name,)
    return tuple(f"{name}.part-{number:05d}" for number in range(-(-file.size // part_bytes)))


def part_size(file: MirrorFile, number: int, part_bytes: int = PART_BYTES) -> int:
    """Bytes of one of them."""
    return min(part_bytes, file.size - number * part_bytes)
