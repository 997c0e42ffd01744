"""Copies one checkpoint to the bucket (:class:`CheckpointUpload`) or back (:class:`CheckpointDownload`).

Both run in a helper thread. An upload sends part after part and creates the list of files last. It keeps the files
open, so the checkpoint can be deleted during the upload. It runs at the lowest priority, is rate-limited, and stops at
the next piece once ``stop`` is set. Parts whose size and MD5 the bucket already has are not sent again, so a restarted
agent continues an upload.

A download verifies the hash of every file, and one rename puts the checkpoint into the checkpoint folder. Until then
its files lie beside that folder in ``.fetch``, where only the agent can write: in the checkpoint folder a job could
replace any file by a link.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec

from spotkeeper.contract import codec
from spotkeeper.contract.uploads import PART_BYTES, MirrorFile, MirrorList, list_name, part_names, part_size
from spotkeeper.train.agent_link.control import Commit
from spotkeeper.train.checkpoint import store
from spotkeeper.train.checkpoint.manifest import Manifest
from spotkeeper.train.checkpoint.store import COMMIT, MOST_PROOF, file_hash, read
from spotkeeper.train.core import beneath
from spotkeeper_agent.cloud.storage import Bucket, FilePart, MissingError, StorageError
from spotkeeper_agent.core.events import Fetched, MirrorThere
from spotkeeper_agent.job.jobhost import share

NICE = 15
BROKEN_OFF = "interrupted by a save, a stop or a notice"
FOLDER = ".fetch"
_TRIES = 2  # tries for a file that arrives damaged: the transfer may have damaged it


class RottenError(Exception):
    """The checkpoint on disk does not match its COMMIT, so it is not copied."""


@dataclass
class Pace:
    """Limits a transfer to ``bytes_s`` bytes per second. Setting ``stop`` ends the transfer."""

    bytes_s: float
    stop: threading.Event
    _due: float = field(default_factory=time.monotonic)

    def take(self, size: int) -> None:
        """Wait until ``size`` more bytes may be sent.

        Raises:
            StorageError: ``stop`` was set.
        """
        now = time.monotonic()
        self._due = max(self._due, now) + size / self.bytes_s
        if self.stop.wait(max(0.0, self._due - now)):
            raise StorageError(BROKEN_OFF)


class Source:
    """A committed checkpoint with open files.

    Raises:
        ValueError: the files' sizes show that the checkpoint is incomplete or damaged.
        OSError: a file cannot be read.
    """

    def __init__(self, ckpt: Path, commit: Commit, node: int, *, replicated: bool) -> None:
        self.manifest: Manifest = read(ckpt, commit)
        writers = sorted({place.slot for place in self.manifest.gang if place.writes})
        self.whole = (node,) if replicated else tuple(writers)
        self.files = tuple(MirrorFile(file.name, file.bytes, file.sha256) for file in self.manifest.files)
        with contextlib.ExitStack() as stack:
            self.proof = beneath.read(ckpt, f"{commit}/{COMMIT}", MOST_PROOF).decode()
            fds = (beneath.open_file(ckpt, f"{commit}/{file.name}") for file in self.files)
            self.open = tuple(stack.enter_context(open(fd, "rb")) for fd in fds)  # noqa: PTH123 - descriptors
            self._stack = stack.pop_all()

    def close(self) -> None:
        self._stack.close()


class CheckpointUpload:
    """Uploads one checkpoint; call :meth:`work` until it succeeds.

    Any thread may set ``stop``. ``count``: number of parts sent."""

    def __init__(
        self, bucket: Bucket, job: str, node: int, source: Source, bytes_s: float, part_bytes: int = PART_BYTES
    ) -> None:
        self.stop = threading.Event()
        self.commit = source.manifest.commit
        self.count = 0
        self._bucket, self._job, self._node, self._source = bucket, job, node, source
        self._bytes_s, self._part_bytes = bytes_s, part_bytes
        self._done: dict[str, hashlib._Hash] = {}  # parts in the bucket, each with the file's digest up to its end

    def work(self) -> MirrorThere:
        """Send the parts that the bucket lacks, then this node's list of files.

        Raises:
            StorageError: the bucket refused a part, or ``stop`` was set; try again.
            RottenError: the files on disk do not match COMMIT.
            OSError: a file cannot be read.
        """
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # the priority of this thread only
        pace = Pace(self._bytes_s, self.stop)
        for file, stream in zip(self._source.files, self._source.open, strict=True):
            self._file(file, stream, pace)
        size = sum(file.size for file in self._source.files) * len(self._source.whole)
        return MirrorThere(self.commit, self._publish(), size)

    def close(self) -> None:
        """Close the files for good, even while the helper thread waits for the bucket, so the disk can be unmounted."""
        self.stop.set()
        self._source.close()

    def _file(self, file: MirrorFile, stream: IO[bytes], pace: Pace) -> None:
        digest = hashlib.sha256()
        for number, name in enumerate(part_names(self._job, str(self.commit), self._node, file, self._part_bytes)):
            if name not in self._done:
                start, size = number * self._part_bytes, part_size(file, number, self._part_bytes)
                self._done[name] = self._part(name, stream, start, size, digest.copy(), pace)
                self.count += 1
            digest = self._done[name]
        if digest.hexdigest() != file.sha256:
            raise RottenError(f"{file.name} of {self.commit} does not match its hash in COMMIT: no copy is made")

    def _part(
        self, name: str, stream: IO[bytes], start: int, size: int, digest: hashlib._Hash, pace: Pace
    ) -> hashlib._Hash:
        """Send one part unless the bucket has it; return the file's digest up to the part's end."""
        there = self._bucket.find(name)
        if there is not None and there.size == size:
            known = digest.copy()
            md5 = FilePart(stream, start, size, self._check_stop, known).read_through()
            # S3 has no MD5 of an object that it joined from parts. Size is enough then: the name belongs to this
            # checkpoint alone, objects are complete, and a download compares hashes.
            if there.md5 in ("", md5):
                return known
        reader = FilePart(stream, start, size, pace.take, digest)
        sent = self._bucket.send(name, reader)
        if (sent.size, sent.md5) != (size, reader.md5.hexdigest()):
            raise StorageError(f"{name}: the bucket's object ({sent.size} bytes) differs from what was sent")
        _forget(stream, start, size)
        return digest

    def _check_stop(self, _: int) -> None:
        if self.stop.is_set():
            raise StorageError(BROKEN_OFF)

    def _publish(self) -> bool:
        """Create this node's list of files; return whether the copy is complete: all nodes have created their lists."""
        source = self._source
        content = MirrorList(
            self.commit.gen,
            self.commit.step,
            self._node,
            source.whole,
            source.files,
            source.proof,
            source.manifest.saved_at,
            self._part_bytes,
        )
        self._bucket.create(list_name(self._job, str(self.commit), self._node), msgspec.json.encode(content))
        # Each node creates its list before it looks for the others', so the last node finds them all.
        others = (node for node in source.whole if node != self._node)
        return all(self._bucket.find(list_name(self._job, str(self.commit), node)) is not None for node in others)


def _forget(stream: IO[bytes], start: int, size: int) -> None:
    """Drop the part from the page cache: the trainer needs that memory."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError, ValueError):
            os.posix_fadvise(stream.fileno(), start, size, os.POSIX_FADV_DONTNEED)


class NoCopyError(Exception):
    """The copy in the bucket is damaged or gone, so another try does not help."""


class CheckpointDownload:
    """Fetches one checkpoint; call :meth:`work` until it succeeds.

    Any thread may set ``stop``. ``count``: bytes that arrived; ``over``: the loop sets it when the fetch has ended.
    """

    def __init__(self, bucket: Bucket, job: str, commit: Commit, source: int, ckpt: Path) -> None:
        self.stop = threading.Event()
        self.commit = commit
        self.count = 0
        self.over = False
        self._bucket, self._job, self._source, self._ckpt = bucket, job, source, ckpt

    def work(self) -> Fetched:
        """Fetch the missing files and publish the checkpoint.

        Raises:
            NoCopyError: the copy does not exist or is damaged.
            StorageError: the bucket does not answer, or ``stop`` was set; try again.
            OSError: the disk cannot be written.
        """
        if self.commit in store.complete(self._ckpt):
            return Fetched(self.commit)
        try:
            listed = self._list()
            home = self._ckpt.with_name(FOLDER) / str(self.commit)
            _clear(home.parent, home)
            for file in listed.files:
                self._file(file, listed, home)
        except MissingError as error:
            raise NoCopyError(str(error)) from None
        self._publish(home, listed.commit.encode())
        return Fetched(self.commit, self.count)

    def _list(self) -> MirrorList:
        name = list_name(self._job, str(self.commit), self._source)
        try:
            listed = codec.decode(b"".join(self._bucket.read(name)), MirrorList)
            manifest = Manifest.from_bytes(listed.commit.encode())
        except (msgspec.DecodeError, ValueError) as error:
            raise NoCopyError(f"{name} is invalid: {error}") from None
        sums = tuple(MirrorFile(file.name, file.bytes, file.sha256) for file in manifest.files)
        if manifest.commit != self.commit or sums != listed.files or not all(_plain(file.name) for file in sums):
            raise NoCopyError(f"{name}: the list does not match the COMMIT that it contains")
        return listed

    def _file(self, file: MirrorFile, listed: MirrorList, home: Path) -> None:
        """Fetch one file unless an earlier try has fetched it."""
        target = home / file.name
        if target.is_file() and target.stat().st_size == file.size and file_hash(target) == file.sha256:
            return
        for _ in range(_TRIES):
            if self._write(file, listed, target) == file.sha256:
                return
        raise NoCopyError(f"{self.commit}: {file.name} does not match its hash in COMMIT")

    def _write(self, file: MirrorFile, listed: MirrorList, target: Path) -> str:
        """Write a file from its parts; return its hash, or "" if a part has the wrong size."""
        digest = hashlib.sha256()
        names = part_names(self._job, str(self.commit), listed.node, file, listed.part_bytes)
        with target.open("wb") as out:
            for number, name in enumerate(names):
                got = 0
                for piece in self._bucket.read(name):
                    if self.stop.is_set():
                        raise StorageError("interrupted: the checkpoint is no longer wanted")
                    got += len(piece)
                    self.count += len(piece)
                    digest.update(piece)
                    out.write(piece)
                if got != part_size(file, number, listed.part_bytes):
                    return ""
            out.flush()
            os.fsync(out.fileno())
        return digest.hexdigest()

    def _publish(self, home: Path, proof: bytes) -> None:
        """Write COMMIT once all files are on disk, then rename the folder to its final name."""
        store.replace(home / COMMIT, proof)
        for path in (*home.iterdir(), home):
            share(path)
        if os.path.lexists(self._ckpt / str(self.commit)):  # a damaged one: an intact one would not be fetched
            store.quarantine(self._ckpt, self.commit)
        home.rename(self._ckpt / str(self.commit))
        store.sync_folder(self._ckpt)
        with contextlib.suppress(OSError):
            home.parent.rmdir()


def _clear(folder: Path, home: Path) -> None:
    """Delete the files of other fetches, but not those that an earlier try of this fetch left."""
    home.mkdir(parents=True, exist_ok=True)
    for other in folder.iterdir():
        if other != home:
            beneath.remove(folder, other.name)


def _plain(name: str) -> bool:
    """Whether a name is a plain file name. Any machine can write the bucket, so a list can contain other names."""
    return name not in ("", ".", "..", COMMIT) and "/" not in name and "\0" not in name
