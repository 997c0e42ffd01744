"""What machines upload besides reports: logs, output files, copies of checkpoints. Does no I/O.

::

    jobs/<job>/logs/<node>/<gen>/<unix ms>.gz        a chunk of the node's complete log: gzip members of lines
        1764000000123 0e Traceback (most recent call last):          (``launcher/spool.py``)
    jobs/<job>/logs/<node>/chunks.json               :class:`LogIndex`, for the node's next machine
    jobs/<job>/logs/<node>/<gen>.log                 ends of several files, each below a line that says what it is:
        --- node 2 (sk-prod-abcdefgh-n0002-a1) stdout: bytes 1300000 to 1365000 of /run/spotkeeper/.../stdout.log
    jobs/<job>/logs/metrics/<gen>                    a generation's metrics (``contract/metrics.py``)
    jobs/<job>/out/<node>.json                       :class:`Output`, written last by the node's agent
    jobs/<job>/out/<node>/<name>                     the files of this output
    jobs/<job>/ckpt/<gen>-<step>/<node>/<file>       a copy of a file of the checkpoint; COMMIT is not copied
    jobs/<job>/ckpt/<gen>-<step>/<node>/<file>.part-<nnnnn>   the file in pieces instead, if larger than PART_BYTES
    jobs/<job>/ckpt/<gen>-<step>/<node>.json         :class:`MirrorList`, written last and create-only

The agent writes these objects, the command reads them. A list is written last, so every file that a list names is
complete: a reader never gets half an upload, nor files of two generations together. A log's newest chunk is replaced by
a longer one every few seconds until it has ``CHUNK_BYTES``; then the next one begins. With replicated state one node's
copy is a whole checkpoint; with sharded state the list names the nodes whose parts together make a whole checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, Struct

PART_BYTES = 64 << 20  # size of one object: the most that a lost machine's upload repeats and a reader has in memory
LIST_BYTES = 64 << 20  # of a list of files that a reader takes: 10,000 files with long paths
CHUNK_BYTES = 4 << 20  # of a complete log, compressed
LOG_BYTES = 2 << 20  # of the ends of a node's files: more than an agent writes (``job/logs.py``)
MOST_CHUNKS = 4000  # of a node in the bucket
CHUNK = re.compile(r"(\d+)/(\d{13})\.gz\Z")  # a chunk's name below its node's folder: generation, start
_HEAD = re.compile(rb"--- ([^\n]*): bytes (\d{1,18}) to (\d{1,18}) of ([^\n]+)\n")


@dataclass(frozen=True)
class LogPart:
    """A piece of a log: ``text`` begins at byte ``start`` of the machine's file ``path``.

    If ``path`` is "", the text is from no file, such as the agent's own message; then ``start`` means nothing.
    """

    title: str
    text: bytes
    start: int = 0
    path: str = ""

    @property
    def end(self) -> int:
        return self.start + len(self.text)


def join_log(parts: Iterable[LogPart]) -> bytes:
    """Join parts to one log object. Every part begins on a new line."""
    out = b""
    for part in parts:
        if out and not out.endswith(b"\n"):
            out += b"\n"
        if part.path:
            out += f"--- {part.title}: bytes {part.start} to {part.end} of {part.path}\n".encode()
        out += part.text
    return out


def split_log(data: bytes) -> tuple[LogPart, ...]:
    """Split a log object into its parts, in order."""
    out = []
    at = 0
    while at < len(data):
        head = _HEAD.match(data, at)
        if head is None:
            out.append(LogPart("", data[at:]))
            break
        start, end = int(head[2]), int(head[3])
        text = data[head.end() : head.end() + max(0, end - start)]
        out.append(LogPart(head[1].decode("utf-8", "replace"), text, start, head[4].decode("utf-8", "replace")))
        at = head.end() + len(text)
        if data[at : at + 1] == b"\n" and not text.endswith(b"\n"):
            at += 1
    return tuple(out)


class LogChunk(Struct, frozen=True, forbid_unknown_fields=True):
    """A chunk of a node's complete log. ``at``: when it began, real unix ms; ``size``: 0 while it grows."""

    gen: Annotated[int, Meta(ge=0)]
    at: Annotated[int, Meta(ge=0, lt=9 * 10**12)]  # a name has 13 digits
    size: Annotated[int, Meta(ge=0)] = 0


class LogIndex(Struct, frozen=True, forbid_unknown_fields=True):
    """A node's chunks, oldest first. ``deleted``: bytes of older ones that ``logs.keep_mb`` left no space for."""

    chunks: Annotated[tuple[LogChunk, ...], Meta(max_length=MOST_CHUNKS)] = ()
    deleted: Annotated[int, Meta(ge=0)] = 0


def log_folder(job: str, node: int) -> str:
    return f"jobs/{job}/logs/{node}/"


def log_index(job: str, node: int) -> str:
    return f"{log_folder(job, node)}chunks.json"


def chunk_name(job: str, node: int, gen: int, at: int) -> str:
    return f"{log_folder(job, node)}{gen}/{at:013d}.gz"


class OutputFile(Struct, frozen=True, forbid_unknown_fields=True):
    """An output file. ``path``: as the job wrote it, below its folder. ``name``: below ``out/<node>/`` in the bucket.

    ``md5``: in hex. Both clouds can check this hash, which detects damage but not an attacker's change.
    """

    path: str
    name: str
    size: int
    md5: str


class Output(Struct, frozen=True, forbid_unknown_fields=True):
    """A node's output, ``jobs/<job>/out/<node>.json``. ``left_out``: files that were not uploaded, with reasons."""

    gen: int
    files: tuple[OutputFile, ...]
    left_out: tuple[str, ...] = ()

    def size(self) -> int:
        return sum(file.size for file in self.files)


class MirrorFile(Struct, frozen=True, forbid_unknown_fields=True):
    """A file of a checkpoint's copy. ``name``: in the checkpoint's folder. ``sha256``: in hex, as COMMIT has it."""

    name: str
    size: int
    sha256: str


class MirrorList(Struct, frozen=True, forbid_unknown_fields=True):
    """Lists the files of a node's part of a checkpoint copy: ``jobs/<job>/ckpt/<gen>-<step>/<node>.json``."""

    gen: int
    step: int
    node: int
    whole: tuple[int, ...]  # the nodes whose parts together make a whole checkpoint
    files: tuple[MirrorFile, ...]
    commit: str  # the content of the checkpoint's own COMMIT file, as text
    saved_at: float  # when it was saved, real unix seconds, as COMMIT has it
    part_bytes: int = PART_BYTES

    def size(self) -> int:
        return sum(file.size for file in self.files)


def mirror_folder(job: str) -> str:
    return f"jobs/{job}/ckpt/"


def list_name(job: str, commit: str, node: int) -> str:
    """Return the path of a node's :class:`MirrorList`. ``commit``: ``<gen>-<step>``."""
    return f"{mirror_folder(job)}{commit}/{node}.json"


def part_names(job: str, commit: str, node: int, file: MirrorFile, part_bytes: int = PART_BYTES) -> tuple[str, ...]:
    """Return the paths of the objects that together contain a file, in order. An empty file is one empty object."""
    name = f"{mirror_folder(job)}{commit}/{node}/{file.name}"
    if file.size <= part_bytes:
        return (name,)
    return tuple(f"{name}.part-{number:05d}" for number in range(-(-file.size // part_bytes)))


def part_size(file: MirrorFile, number: int, part_bytes: int = PART_BYTES) -> int:
    """Return the size in bytes of the object with this number, of those that together contain a large file."""
    return min(part_bytes, file.size - number * part_bytes)
