"""Staging memory and its way to disk: the shared memory file, files written without the page cache.

Files are hashed while they are written, COMMIT (or PART) comes last, and a failed write leaves no files behind. The
saver decides whether a checkpoint may be written. Standard library only: this runs in the saver.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import hashlib
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spotkeeper.train.agent_link.control import Commit, Fault
from spotkeeper.train.checkpoint import store
from spotkeeper.train.checkpoint.manifest import FileSum, Manifest
from spotkeeper.train.checkpoint.protocol import Stretch
from spotkeeper.train.core.headroom import SAVE_SHARE, memory_refusal

PAGE = 4096
CHUNK = 16 << 20
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # of madvise(2)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def map_shared(fd: int, size: int) -> mmap.mmap:
    """Map a memory file that another process shares. All pages are mapped now, not at their first use.

    Raises:
        OSError: no memory.
    """
    return mmap.mmap(fd, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))


def private_memory(size: int) -> memoryview:
    """Return zeroed memory of this process. (What ``mmap.mmap(-1, size)`` returns is a file, for forks to share.)"""
    memory = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return memoryview(memory)[:size]


class CopyOnWrite(mmap.mmap):
    """A private mapping of another process's memory file: a page is this process's own once it has written there.

    The other pages change with the file. So before the file changes, ``own`` copies the pages of all pieces that are
    in use (``freed_after``); a process that maps 300 MB so has them at once, and copies them while it trains.
    """

    def __new__(cls, fd: int, size: int) -> CopyOnWrite:
        """Map the file.

        Raises:
            OSError: no memory.
        """
        return super().__new__(cls, fd, size, flags=mmap.MAP_PRIVATE)

    def __init__(self, fd: int, size: int) -> None:
        self._pieces: list[tuple[weakref.ref[memoryview], int, int]] = []
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self))
        self.ownable = self._populate(_POPULATE_READ, 0, size) == 0  # else ``own`` has no way (Linux before 5.14)

    def use(self, piece: memoryview, at: int) -> None:
        """Note that ``piece``, the bytes from offset ``at``, is in use as long as the object lives."""
        self._pieces.append((weakref.ref(piece), at, len(piece)))

    def own(self) -> None:
        """Copy all pages of pieces in use that this process has not written to. Other threads may write meanwhile.

        Raises:
            OSError: no memory; the pieces may still change with the file.
        """
        while self._pieces:
            used, at, count = self._pieces[-1]
            if (piece := used()) is not None:
                for first in range(at // PAGE * PAGE, at + count, CHUNK):
                    if failed := self._populate(_POPULATE_WRITE, first, min(CHUNK, at + count - first)):
                        raise OSError(failed, os.strerror(failed))
                del piece
            self._pieces.pop()

    def _populate(self, how: int, at: int, count: int) -> int:
        """Return 0 or an error number. ``mmap.madvise`` keeps the interpreter's lock; this call does not."""
        return ctypes.get_errno() if _libc().madvise(self._start + at, count, how) else 0


def allocate(memory: memoryview) -> None:
    """Allocate the pages of a ``private_memory`` now, not at their first use. Without effect before Linux 5.14."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for at in range(0, len(memory), CHUNK):
        _libc().madvise(start + at, min(CHUNK, len(memory) - at), _POPULATE_WRITE)


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return libc


def freed_after(memory: memoryview, at: int, count: int) -> memoryview:
    """Return ``count`` bytes of this process's memory, whose pages are freed once nothing uses the returned object."""
    piece = memory[at : at + count]
    first, end = round_up(at), (at + count) // PAGE * PAGE
    if first < end and isinstance(memory.obj, mmap.mmap):
        free = memory.obj.madvise
        weakref.finalize(piece, free, mmap.MADV_DONTNEED, first, end - first).atexit = False
    if isinstance(memory.obj, CopyOnWrite):
        memory.obj.use(piece, at)
    return piece


@dataclass(frozen=True)
class MemoryHandle:
    """What the other ranks of a node need to open the node's staging memory."""

    pid: int
    fd: int
    size: int  # bytes

    def to_bytes(self) -> bytes:
        return f"{self.pid} {self.fd} {self.size}".encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> MemoryHandle:
        return cls(*map(int, data.split()))


class NeighbourMemory:
    """The node's staging memory, opened through another rank's descriptor in /proc. All saves use one mapping."""

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self._key: tuple[int, int, int] | None = None

    def open(self, offer: MemoryHandle) -> memoryview:
        """Map the memory.

        Raises:
            OSError: the memory is gone, or belongs to another user.
        """
        fd = os.open(f"/proc/{offer.pid}/fd/{offer.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            key = (status.st_dev, status.st_ino, offer.size)
            if key != self._key or self._map is None:
                self._map, self._key = map_shared(fd, offer.size), key
        finally:
            os.close(fd)
        return memoryview(self._map)


def round_up(size: int) -> int:
    """Round up to whole pages."""
    return -(-size // PAGE) * PAGE


class Buffer:
    """The staging memory: a memory file that trainer and saver map. It grows and never shrinks.

    The kernel refuses to shrink it (a seal of the file), because the saver would die of SIGBUS when it reads bytes that
    a trainer has cut off. Growth is not sealed: the saver itself grows the file, and reads only what it has allocated.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("spotkeeper", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        self.size = 0
        self.staged: Manifest | None = None  # durable checkpoint in the memory
        self.stretches: tuple[Stretch, ...] = ()

    def reserve(self, size: int, share: int = SAVE_SHARE) -> None:
        """Allocate the memory's pages now, in the saver. 1/``share`` of the memory must stay free.

        Otherwise the trainer's first copy into the memory would allocate them, and stop the training for 3 s per GB.

        Raises:
            OSError: no memory; the size is unchanged.
        """
        if size > self.size:
            if why := memory_refusal(size - self.size, share):
                raise OSError(errno.ENOMEM, why)
            with _killed_first():
                os.posix_fallocate(self.fd, 0, size)
            self.size = size

    def covers(self, stretch: Stretch) -> bool:
        whole = stretch.offset % PAGE == 0
        return whole and stretch.offset + max(PAGE, round_up(stretch.bytes)) <= self.size

    def close(self) -> None:
        os.close(self.fd)


@contextlib.contextmanager
def _killed_first() -> Iterator[None]:
    """Make the kernel kill this process, not the trainer, if memory runs out during the ``with`` block."""
    path = Path("/proc/self/oom_score_adj")
    before = ""
    with contextlib.suppress(OSError):
        before = path.read_text()
        path.write_text("1000")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.write_text(before)


def fault_of(error: OSError) -> Fault:
    return Fault.DISK_FULL if error.errno in _FULL else Fault.WRITE_FAILED


def reason(error: OSError) -> str:
    """Return the system's message for an error, with a remedy for some errors."""
    return f"{error} (`ulimit -f` limits the size of files)" if error.errno == errno.EFBIG else str(error)


def save_refusal(folder: Path, commit: Commit, gen: int) -> str:
    """Return why a writer of generation ``gen`` may not write ``commit`` to this disk; "" if it may."""
    there = store.scan(folder)
    if there and there[0].gen > gen:
        return f"the disk has checkpoint {there[0]}, which is newer than the writer's generation {gen}"
    if commit not in there:
        return ""
    if any(commit in found for found in (store.complete(folder), store.partial(folder))):
        return f"{commit} exists already"
    if not (folder / str(commit)).is_dir():
        return f"{folder / str(commit)} is in the way: it is not a checkpoint; move it elsewhere"
    store.quarantine(folder, commit)  # left by a save that failed with the disk
    return ""


def write_checkpoint(
    folder: Path,
    manifest: Manifest,
    buffer: Buffer,
    stretches: tuple[Stretch, ...],
    part: bool,
    check: Callable[[], None] = lambda: None,
) -> Manifest:
    """Write all files, then COMMIT (PART if ``part``); return the manifest with hashes. On an error no file remains.

    ``check`` is called before COMMIT, and raises an exception if the written bytes are not one image.
    """
    home = folder / str(manifest.commit)
    home.mkdir()
    try:
        try:
            sums = _write_files(home, buffer.fd, stretches)
        except OSError as error:
            if error.errno not in _FULL or not store.empty_quarantine(folder):
                raise
            sums = _write_files(home, buffer.fd, stretches)
        check()
        manifest = replace(manifest, files=sums)
        (store.publish_part if part else store.publish)(home, manifest)
    except Exception:  # includes RuntimeError, if no thread can be started
        with contextlib.suppress(OSError):
            store.quarantine(folder, manifest.commit)  # renames, so no half deleted folder has a COMMIT
            store.empty_quarantine(folder)
        raise
    return manifest


def _write_files(home: Path, memory: int, stretches: tuple[Stretch, ...]) -> tuple[FileSum, ...]:
    return tuple(_write_file(home / stretch.name, memory, stretch) for stretch in stretches)


def _write_file(path: Path, memory: int, stretch: Stretch) -> FileSum:
    """Write one file while a second thread hashes its bytes. Both threads release the GIL."""
    rounded = round_up(stretch.bytes)
    with mmap.mmap(memory, max(rounded, PAGE), prot=mmap.PROT_READ, offset=stretch.offset) as mapped:
        view = memoryview(mapped)
        digest = hashlib.sha256()
        hashing = threading.Thread(target=_hash, args=(digest, view[: stretch.bytes]))
        hashing.start()
        try:
            _write_bytes(path, view, stretch.bytes)
        finally:
            hashing.join()
            view.release()
    return FileSum(stretch.name, stretch.bytes, digest.hexdigest())


def _hash(digest: Any, view: memoryview) -> None:
    with view:
        for at in range(0, len(view), CHUNK):
            digest.update(view[at : at + CHUNK])


def _write_bytes(path: Path, view: memoryview, size: int) -> None:
    """Write a file without the page cache if the file system allows that: through the cache, 2 GB took up to 17 s."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        if size:
            os.posix_fallocate(fd, 0, size)  # a full disk fails here, before any write
        if not _write_direct(path, view, size):
            with view[:size] as part:
                _write_all(fd, part)
        os.ftruncate(fd, size)
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_direct(path: Path, view: memoryview, size: int) -> bool:
    """Write whole pages with O_DIRECT; False if the file system refuses. The caller cuts off the last page's excess."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    try:
        with view[: round_up(size)] as part:
            _write_all(fd, part)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    finally:
        os.close(fd)
    return True


def _write_all(fd: int, view: memoryview) -> None:
    at = 0
    while at < len(view):
        with view[at : at + CHUNK] as chunk:  # released also after an error, whose traceback refers to the chunk
            at += os.pwrite(fd, chunk, at)
