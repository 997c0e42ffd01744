"""The complete log of a node: takes the workers' lines from the spool and keeps them in the bucket as chunks.

The agent's folder for one generation is ``logs/<job>/<node>-<gen>`` on the boot disk::

    spool/           the workers' output (``launcher/spool.py``); only the agent can write the other files
    <unix ms>        a chunk that is not completely in the bucket yet
    read.json        how much of torchrun's log and of the stack traces the chunks have

These files hold all that a restarted agent needs to continue where the last one ended, and all output that could not be
sent while the bucket did not answer. The job can put anything into ``spool``, so the agent follows no link there, opens
no pipe, copies files only up to a size, and never unpacks them. It holds one such file in memory at a time.

Each node has an even share of the job's ``logs.keep_mb`` in the bucket. Beyond it the node's machine deletes the node's
oldest chunks. It needs no further right for this: machines overwrite their newest chunk, and on Cloud Storage an
overwrite needs the right to delete. ``chunks.json`` lists the chunks for the node's next machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from spotkeeper.contract import codec
from spotkeeper.contract.redact import known
from spotkeeper.contract.uploads import CHUNK_BYTES, MOST_CHUNKS, LogChunk, LogIndex, chunk_name, log_index
from spotkeeper.train.core import beneath
from spotkeeper_agent.cloud.storage import Bucket, HashedPart, StorageError
from spotkeeper_agent.job.jobhost import share
from spotkeeper_agent.launcher import stacks
from spotkeeper_agent.launcher.spool import NOTE, SPOOL_FILES, has_room, hide, packed, reach, size

SPOOL, READ = "spool", "read.json"
LAUNCHER_LOG = "torchrun.log"
MEMBER_BYTES = 512 << 10  # of a file in the spool
UNSENT_BYTES = 256 << 20  # chunks on the disk; beyond that, lines wait in the spool
LEFT_S = 86_400.0  # real; an earlier generation's log that could not be sent for this long is given up
PIECE = 64 << 10
BEHIND = 1 << 20  # bytes; of a file that grows faster than it is read, the middle is left out
INDEX_BYTES = 1 << 20
LEAST_CHUNK = 64 << 10
FILES = ((LAUNCHER_LOG, b"t"), (stacks.TEXT, b"s"))
_MEMBER = re.compile(r"\d{13}-\d{1,4}-\d{1,10}-\d{1,10}\.gz\Z")
_CHUNK = re.compile(r"\d{13}\Z")


@dataclass(frozen=True)
class NodeRun:
    """A node's part in a generation. ``share``: bytes that the node's chunks may take in the bucket; None: no limit."""

    job: str
    node: int
    gen: int
    share: int | None = field(default=None, compare=False)  # a folder found on the disk does not tell

    def folder(self, logs: Path) -> Path:
        return logs / self.job / f"{self.node}-{self.gen}"

    @property
    def chunk_bytes(self) -> int:
        return CHUNK_BYTES if self.share is None else max(LEAST_CHUNK, min(CHUNK_BYTES, self.share // 4))


def make_spool(logs: Path, run: NodeRun) -> Path:
    """Make the folder that a generation's workers write into. Raises OSError."""
    folder = run.folder(logs) / SPOOL
    folder.mkdir(parents=True, exist_ok=True)
    share(folder)
    return folder


def left(logs: Path) -> list[NodeRun]:
    """Return the generations with a folder here, oldest first."""
    found = []
    for path in logs.glob("*/*-*"):
        node, _, gen = path.name.partition("-")
        if node.isdecimal() and gen.isdecimal():
            found.append(NodeRun(path.parent.name, int(node), int(gen)))
    return sorted(found, key=lambda run: (run.job, run.gen))


@dataclass
class NodeLog:
    """One generation's log on its way into the bucket. Only the uploader's thread uses it."""

    bucket: Bucket
    logs: Path
    run: NodeRun
    _sent: dict[str, int] = field(default_factory=dict)  # bytes of each chunk in the bucket
    _index: LogIndex | None = None
    _read: dict[str, int] | None = None  # bytes of torchrun's log and of the stack traces in the chunks
    _first: bool = True  # nothing was taken from the spool yet

    @property
    def folder(self) -> Path:
        return self.run.folder(self.logs)

    # -- from the spool into chunks on the disk

    def collect(self, run: Path | None, *, last: bool = False) -> bool:
        """Move the spool's files into chunks, and add new lines of torchrun's log and of ``stacks.log``.

        ``run``: the run folder. Returns whether the disk had room for all of the spool.
        """
        if not self.folder.is_dir():
            return True
        with contextlib.suppress(FileNotFoundError):  # the folder has notes only
            found = [name for name in beneath.names(self.folder, SPOOL, 2 * SPOOL_FILES) if _MEMBER.match(name)]
            for name in sorted(found):
                if not self._room():
                    return False
                self._move(name)
        if run is not None:
            self._read_files(run, last=last)
        return True

    def note(self, text: str) -> None:
        """Add a note from the agent to the log."""
        if not text:
            return
        with contextlib.suppress(OSError):  # the disk is full
            self.folder.mkdir(parents=True, exist_ok=True)
            self._append(packed(time.time(), NOTE, hide(text.encode(), known()).rstrip(b"\n")))

    def _move(self, name: str) -> None:
        try:
            data = beneath.read(self.folder, f"{SPOOL}/{name}", MEMBER_BYTES)
        except OSError:  # a link, a pipe, something large: not an output worker's
            return
        # The last agent may have been killed between these two steps.
        if not (self._first and self._ends_with(data)):
            self._append(data)
        self._first = False
        with beneath.folder(self.folder, SPOOL) as at:
            os.unlink(name, dir_fd=at)

    def _ends_with(self, data: bytes) -> bool:
        for name in self._chunks()[-1:]:
            at = (self.folder / name).stat().st_size - len(data)
            with (self.folder / name).open("rb") as file:
                return at >= 0 and os.pread(file.fileno(), len(data), at) == data
        return False

    def _append(self, data: bytes) -> None:
        chunks = self._chunks()
        newest = chunks[-1] if chunks else ""
        if not newest or (self.folder / newest).stat().st_size >= self.run.chunk_bytes:
            at = max(round(time.time() * 1000), int(newest or 0) + 1, *(each + 1 for each in self._known()))
            newest = f"{at:013d}"
        with (self.folder / newest).open("ab") as file:
            file.write(data)

    def _known(self) -> list[int]:
        return [0, *(chunk.at for chunk in self._index.chunks if chunk.gen == self.run.gen)] if self._index else [0]

    def _chunks(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if _CHUNK.match(path.name))

    def _room(self) -> bool:
        held = sum((self.folder / name).stat().st_size for name in self._chunks())
        return held < UNSENT_BYTES and has_room(self.folder)

    def _read_files(self, run: Path, *, last: bool) -> None:
        if self._read is None:
            self._read = self._read_before()
        read = self._read
        for name, source in FILES:
            with contextlib.suppress(OSError):  # the job may have replaced it
                while self._read_piece(run, name, source, read, last=last) and self._room():
                    beneath.replace(self.folder, READ, json.dumps(read).encode())

    def _read_before(self) -> dict[str, int]:
        with contextlib.suppress(OSError, ValueError, msgspec.ValidationError):
            return codec.decode((self.folder / READ).read_bytes(), dict[str, int])
        return {}

    def _read_piece(self, run: Path, name: str, source: bytes, read: dict[str, int], *, last: bool) -> bool:
        """Append the next whole lines of a file in the run folder to the newest chunk; return False if it has none."""
        length, at = beneath.size(run, name), read.get(name, 0)
        if length - at > BEHIND:
            self.note(f"{size(length - PIECE - at)} of {name} left out here")
            at = length - PIECE
        secrets = known()
        around = reach(secrets)
        begins = max(0, at - around)
        fd = beneath.open_file(run, name)
        try:
            text = hide(os.pread(fd, at - begins + PIECE + around, begins), secrets)[at - begins :]
        finally:
            os.close(fd)
        piece = text[:PIECE]
        end = piece.rfind(b"\n") + 1
        if (last and len(text) <= PIECE) or (not end and (last or len(text) == PIECE + around)):
            end = len(piece)
        if not end:
            return False
        self._append(packed(time.time(), source, piece[:end].removesuffix(b"\n")))
        read[name] = at + end
        return True

    # -- from the disk into the bucket

    def upload(self, *, last: bool = False) -> None:
        """Send what the bucket lacks. ``last``: the generation has ended, so its newest chunk is complete too.

        Raises:
            StorageError: try again.
            OSError: the disk cannot be read.
        """
        if not self.folder.is_dir():
            return
        chunks = self._chunks()
        for name in chunks:
            path = self.folder / name
            length = path.stat().st_size
            closed = last or name != chunks[-1]
            if self._sent.get(name) != length:
                self._announce(int(name))
                with path.open("rb") as file:
                    self.bucket.send(self._name(int(name)), HashedPart(file, length))
                self._sent[name] = length
            if closed:
                self._close(int(name), length)
                path.unlink()

    def forget(self) -> None:
        """Delete the folder; call it once everything is sent and no process of the generation is left."""
        beneath.remove(self.logs, f"{self.run.job}/{self.folder.name}")
        with contextlib.suppress(OSError):
            self.folder.parent.rmdir()

    def _name(self, at: int) -> str:
        return chunk_name(self.run.job, self.run.node, self.run.gen, at)

    def _announce(self, at: int) -> None:
        """List a chunk before it is sent, so that it counts against the share even if this machine is killed."""
        index = self._index or self._load()
        mine = LogChunk(self.run.gen, at)
        if all((chunk.gen, chunk.at) != (mine.gen, mine.at) for chunk in index.chunks):
            index = self._within_share(msgspec.structs.replace(index, chunks=(*index.chunks, mine)))
            self._write(index)
        self._index = index

    def _close(self, at: int, length: int) -> None:
        index = self._index or self._load()
        chunks = tuple(
            LogChunk(chunk.gen, chunk.at, length) if (chunk.gen, chunk.at) == (self.run.gen, at) else chunk
            for chunk in index.chunks
        )
        if chunks != index.chunks:
            index = self._within_share(msgspec.structs.replace(index, chunks=chunks))
            self._write(index)
        self._index = index

    def _within_share(self, index: LogIndex) -> LogIndex:
        """Delete the oldest chunks beyond the node's share; the newest one always stays."""
        chunks, deleted = list(index.chunks), index.deleted
        held = sum(chunk.size or self.run.chunk_bytes for chunk in chunks)
        most = self.run.share
        while len(chunks) > 1 and (len(chunks) > MOST_CHUNKS or (most is not None and held > most)):
            oldest = chunks.pop(0)
            self.bucket.delete(chunk_name(self.run.job, self.run.node, oldest.gen, oldest.at))
            held -= oldest.size or self.run.chunk_bytes
            deleted += oldest.size or self.run.chunk_bytes
        return LogIndex(tuple(chunks), deleted)

    def _load(self) -> LogIndex:
        """Read the node's list of chunks, and fill in the sizes that are missing.

        A machine that is killed while it sends a chunk leaves the chunk's entry without a size. Before the read, an
        empty list is created if there is none: machines may not list a bucket of Cloud Storage, which therefore answers
        a read of a missing object with 403.
        """
        name = log_index(self.run.job, self.run.node)
        if self.bucket.create(name, msgspec.json.encode(LogIndex())):
            return LogIndex()
        data = b""
        for piece in self.bucket.read(name):
            data += piece
            if len(data) > INDEX_BYTES:
                break
        try:
            index = codec.decode(data, LogIndex)
        except msgspec.DecodeError:  # of another version, or damaged: what it listed stays in the bucket
            return LogIndex()
        return msgspec.structs.replace(index, chunks=tuple(self._sized(chunk) for chunk in index.chunks))

    def _sized(self, chunk: LogChunk) -> LogChunk:
        if chunk.size or (chunk.gen == self.run.gen and (self.folder / f"{chunk.at:013d}").exists()):
            return chunk
        with contextlib.suppress(StorageError):
            found = self.bucket.find(chunk_name(self.run.job, self.run.node, chunk.gen, chunk.at))
            return msgspec.structs.replace(chunk, size=found.size if found else 1)
        return chunk

    def _write(self, index: LogIndex) -> None:
        self.bucket.write(log_index(self.run.job, self.run.node), msgspec.json.encode(index))
