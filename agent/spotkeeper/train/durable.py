"""From staging memory to a checkpoint on disk: the memory file, and how its bytes become files that are whole.

Files are written past the page cache while they are hashed, COMMIT (PART) last; of one that fails nothing stays.
Standard library only, for it runs in the saver. Whether a checkpoint may be written is the saver's to say.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from spotkeeper.train import store
from spotkeeper.train.control import Commit, Fault
from spotkeeper.train.messages import Stretch
from spotkeeper.train.store import FileSum, Manifest

PAGE = 4096
CHUNK = 16 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def round_up(size: int) -> int:
    """To whole pages."""
    return -(-size // PAGE) * PAGE


class Buffer:
    """The memory file: grows, never shrinks, is mapped by trainer and saver."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("spotkeeper", os.MFD_CLOEXEC)
        self.size = 0
        self.held: Manifest | None = None  # what it holds, once that is durable
        self.stretches: tuple[Stretch, ...] = ()

    def reserve(self, size: int) -> None:
        """Fault the memory in here: fresh pages would cost the training loop 3 s per GB."""
        if size > self.size:
            os.posix_fallocate(self.fd, 0, size)
            self.size = size

    def covers(self, stretch: Stretch) -> bool:
        whole = stretch.offset % PAGE == 0
        return whole and stretch.offset + max(PAGE, round_up(stretch.bytes)) <= self.size

    def close(self) -> None:
        os.close(self.fd)


def fault_of(error: OSError) -> Fault:
    return Fault.DISK_FULL if error.errno in _FULL else Fault.WRITE_FAILED


def refusal(folder: Path, commit: Commit, gen: int) -> str:
    """Why a writer of generation ``gen`` may not write ``commit``, by what is on the disk; '' if it may."""
    there = store.scan(folder)
    if there and there[0].gen > gen:
        return f"the disk has {there[0]}, of a newer generation than the writer's {gen}"
    return f"{commit} is there already" if commit in there else ""


def write_checkpoint(
    folder: Path, manifest: Manifest, buffer: Buffer, stretches: tuple[Stretch, ...], part: bool
) -> Manifest:
    """Write all files, then COMMIT (PART). On an error nothing of it stays. Returns the manifest with sums."""
    home = folder / str(manifest.commit)
    home.mkdir()
    try:
        try:
            sums = _write_files(home, buffer.fd, stretches)
        except OSError as error:
            if error.errno not in _FULL or not store.empty_quarantine(folder):
                raise
            sums = _write_files(home, buffer.fd, stretches)
        manifest = replace(manifest, files=sums)
        (store.publish_part if part else store.publish)(home, manifest)
    except OSError:
        with contextlib.suppress(OSError):
            store.quarantine(folder, manifest.commit)  # a rename: at no moment half a checkpoint with a COMMIT
            store.empty_quarantine(folder)
        raise
    return manifest


def _write_files(home: Path, memory: int, stretches: tuple[Stretch, ...]) -> tuple[FileSum, ...]:
    return tuple(_write_file(home / stretch.name, memory, stretch) for stretch in stretches)


def _write_file(path: Path, memory: int, stretch: Stretch) -> FileSum:
    """One thread writes, one hashes; both let the interpreter's lock go."""
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
    """Past the page cache where the file system allows: buffered, 2 GB took up to 17 s to become durable."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        if size:
            os.posix_fallocate(fd, 0, size)  # a full disk says so here, before a byte is written
        if not _write_direct(path, view, size):
            with view[:size] as part:
                _write_all(fd, part)
        os.ftruncate(fd, size)
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_direct(path: Path, view: memoryview, size: int) -> bool:
    """Whole pages with O_DIRECT; the caller cuts the last one to length. False where it is refused."""
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
    """What is cut from ``view`` is given back at once: what an error's traceback still held would keep it mapped."""
    at = 0
    while at < len(view):
        with view[at : at + CHUNK] as chunk:
            at += os.pwrite(fd, chunk, at)
