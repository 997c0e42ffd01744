"""The checkpoint folder on disk: its content, the newest valid checkpoint, retention.

::

    <folder>/<generation>-<step>/   state.bin, skeleton.pkl, and last of all COMMIT
    <folder>/quarantine/            incomplete or damaged checkpoints, at most two
    <folder>/latest                 names the newest checkpoint, for users; no code reads it
    <folder>/.dropped-<name>        a checkpoint whose deletion was interrupted

With sharded state each node has a part: the files of its own ranks, and PART once these files are on disk. When every
node has reported its part, each node writes COMMIT, which lists the files of all nodes. A checkpoint with PART or
COMMIT on every node is complete, even if processes were killed before every node had written COMMIT.

In a single node's folder, PART says nothing about the other nodes, but COMMIT proves that the checkpoint is complete.
COMMIT is written after all other bytes are on disk, by temporary file, fsync, rename and fsync of the folder, and
contains its own hash. The newest checkpoint has the highest (generation, step), not the highest step: a disk that was
away may have later steps of an older generation.

Standard library only: the agent uses this module to list the checkpoints on its disk. While a saver writes to a folder,
other processes may call only ``newest`` and ``scan``, which only read. The agent does not trust the folder: the module
follows no link below the folder (``beneath.py``) and checks every field of a manifest.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from spotkeeper.train.agent_link.control import Commit
from spotkeeper.train.checkpoint.manifest import IMAGE, Manifest
from spotkeeper.train.core import beneath

COMMIT = "COMMIT"
PART = "PART"
STATE = "state.bin"
SKELETON = "skeleton.pkl"
QUARANTINE = "quarantine"
LATEST = "latest"

MOST_PROOF = 32 << 20  # bytes of COMMIT or PART, enough for 100,000 files
_CHUNK = 16 << 20
_DROPPED = ".dropped-"
_QUARANTINED = 2  # checkpoints kept for inspection; only a few, because they take as much space as others


class ChecksumError(ValueError):
    """A file is readable but does not match its hash, so reading it again does not help."""


@dataclass(frozen=True)
class SkippedCheckpoint:
    """A checkpoint that was passed over, with the reason."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


@dataclass(frozen=True)
class NewestCheckpoint:
    """Result of ``newest``."""

    manifest: Manifest | None
    skipped: tuple[SkippedCheckpoint, ...]  # the newer, invalid checkpoints, newest first

    @property
    def commit(self) -> Commit | None:
        return None if self.manifest is None else self.manifest.commit


def newest(folder: Path | str, *, hashes: bool = True) -> NewestCheckpoint:
    """Return the newest checkpoint whose COMMIT is valid, and the newer checkpoints that were skipped.

    Args:
        folder: a checkpoint folder; it may be missing.
        hashes: True reads every byte and compares hashes (about a second per GB). False compares only sizes, which is
            enough for an agent that reports the checkpoints on its disk.
    """
    skipped: list[SkippedCheckpoint] = []
    for commit in scan(folder):
        try:
            manifest = read(folder, commit)
            if hashes:
                verify(folder, manifest)
        except ValueError as error:
            skipped.append(SkippedCheckpoint(str(commit), str(error)))
            continue
        return NewestCheckpoint(manifest, tuple(skipped))
    return NewestCheckpoint(None, tuple(skipped))


def scan(folder: Path | str) -> list[Commit]:
    """Return all checkpoints in ``folder``, complete or not, newest first."""
    names = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        names = beneath.names(folder)
    return sorted((commit for name in names if (commit := Commit.parse(name))), reverse=True)


def read(folder: Path | str, commit: Commit) -> Manifest:
    """Read the manifest of one checkpoint and compare its files' sizes.

    Raises:
        ValueError: the checkpoint is incomplete or damaged.
    """
    if not _there(folder, commit, COMMIT) and _there(folder, commit, PART):
        raise ValueError("no COMMIT: this node's part is complete, but maybe not the parts of the other nodes")
    return _read(folder, commit, COMMIT)


def read_part(folder: Path | str, commit: Commit) -> Manifest:
    """Read the manifest of this node's part of sharded state, even if other nodes may lack their parts.

    Raises:
        ValueError: the part is incomplete or damaged.
    """
    return _read(folder, commit, COMMIT if _there(folder, commit, COMMIT) else PART)


def _read(folder: Path | str, commit: Commit, marker: str) -> Manifest:
    try:
        manifest = Manifest.from_bytes(beneath.read(folder, f"{commit}/{marker}", MOST_PROOF))
    except FileNotFoundError:
        raise ValueError("no COMMIT: the save was not finished") from None
    except OSError as error:
        raise ValueError(f"{marker}: {error.strerror}") from None
    if manifest.commit != commit:
        raise ValueError(f"{marker} belongs to {manifest.commit}, but is in the folder of {commit}")
    for file in manifest.files:
        try:
            size = beneath.size(folder, f"{commit}/{file.name}")
        except OSError as error:
            raise ValueError(f"{file.name}: {error.strerror}") from None
        if size != file.bytes:
            raise ValueError(f"{file.name} has {size} bytes, but {marker} says {file.bytes}")
    return manifest


def file_hash(path: Path, algorithm: str = "sha256") -> str:
    """Return the hash of a file's content, in hex. Raises OSError. (Python 3.10 has no ``hashlib.file_digest``.)"""
    found, buffer = hashlib.new(algorithm, usedforsecurity=False), bytearray(1 << 20)
    with open(beneath.open_file(path.parent, path.name), "rb", buffering=0) as stream:  # noqa: PTH123 - a descriptor
        while count := stream.readinto(buffer):
            found.update(memoryview(buffer)[:count])
    return found.hexdigest()


def verify(folder: Path | str, manifest: Manifest) -> None:
    """Check all files' hashes. Raises ValueError if a file is unreadable, ChecksumError if its hash is wrong."""
    for file in manifest.files:
        try:
            digest = file_hash(Path(folder) / str(manifest.commit) / file.name)
        except OSError as error:
            raise ValueError(f"{file.name}: {error.strerror}") from None
        if digest != file.sha256:
            raise ChecksumError(f"{file.name} does not match its hash in COMMIT")


def read_into(folder: Path | str, manifest: Manifest, name: str, target: memoryview) -> None:
    """Read one file into ``target``, which has the file's size, while a second thread checks the hash.

    Raises:
        ValueError: the file is unreadable.
        ChecksumError: the file is too short, or its hash is wrong.
    """
    from concurrent.futures import ThreadPoolExecutor  # logging comes with it, and the saver reads nothing this way

    file = next(file for file in manifest.files if file.name == name)
    digest = hashlib.sha256()
    at = 0
    try:
        fd = beneath.open_file(folder, f"{manifest.commit}/{name}")
        with open(fd, "rb", buffering=0), ThreadPoolExecutor(1) as hasher:  # noqa: PTH123 - a descriptor
            _skip_cache(fd)
            while at < file.bytes and (count := _read_piece(fd, target[at : min(at + _CHUNK, file.bytes)], at)):
                hasher.submit(digest.update, target[at : at + count])
                at += count
    except OSError as error:
        raise ValueError(f"{name}: {error.strerror}") from None
    if at != file.bytes or digest.hexdigest() != file.sha256:
        raise ChecksumError(f"{name} does not match its hash in COMMIT")


def _skip_cache(fd: int) -> None:
    """Read past the page cache, if the file is not there: the cache's new memory would cost as much as the hash."""
    try:
        os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        with contextlib.suppress(OSError):  # not every file system can
            fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
    except OSError:  # nor tell what is there
        pass


def _read_piece(fd: int, piece: memoryview, at: int) -> int:
    try:
        return os.preadv(fd, [piece], at)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    fcntl.fcntl(fd, fcntl.F_SETFL, 0)  # O_DIRECT reads whole pages, so not the file's end
    return os.preadv(fd, [piece], at)


def publish(home: Path, manifest: Manifest) -> None:
    """Write COMMIT durably, after all other files are on disk."""
    replace(home / COMMIT, manifest.to_bytes())
    sync_folder(home.parent)  # makes the folder's own name durable
    with contextlib.suppress(OSError):  # cleanup only: the checkpoint is complete
        (home / PART).unlink(missing_ok=True)
        replace(home.parent / LATEST, f"{manifest.commit}\n".encode(), durably=False)  # no code reads it


def publish_part(home: Path, manifest: Manifest) -> None:
    """Write PART durably, after all other files of this node are on disk."""
    replace(home / PART, manifest.to_bytes())
    sync_folder(home.parent)


def replace(path: Path, data: bytes, *, durably: bool = True) -> None:
    """Write ``path`` atomically: temporary file, fsync, rename, fsync of the folder.

    ``durably=False`` skips both fsyncs; a crash of the machine may undo the write.
    """
    temporary = path.with_name(path.name + ".tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        while data:  # on a disk that becomes full, one write is partial and the next one fails
            data = data[os.write(fd, data) :]
        if durably:
            os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(temporary, path)  # noqa: PTH105 - the crash tests count the calls of os
    if durably:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def damaged(folder: Path, since: Commit | None) -> list[Commit]:
    """Return the damaged checkpoints newer than ``since``, also those in quarantine, newest first.

    ``since``: the newest complete checkpoint. COMMIT shows that a checkpoint was complete once. So a newer checkpoint
    that has a COMMIT must be damaged, and one without a COMMIT was never finished and is not returned.
    """
    aside = [name for name in _listed(folder, QUARANTINE) if _there(folder, f"{QUARANTINE}/{name}", COMMIT)]
    names = [name.partition(".")[2] for name in aside]
    names += [name for name in _listed(folder) if _there(folder, name, COMMIT)]
    found = {commit for name in names if (commit := Commit.parse(name))}
    return sorted((commit for commit in found if since is None or commit > since), reverse=True)


def _there(folder: Path | str, home: Commit | str, name: str) -> bool:
    try:
        beneath.status(folder, f"{home}/{name}")
    except OSError:  # also a disk error (EIO, EUCLEAN): one unreadable folder must not end the run
        return False
    return True


def _listed(folder: Path, name: str = "") -> list[str]:
    try:
        return beneath.names(folder, name)
    except OSError:
        return []


def prune(folder: Path, keep: int) -> list[Commit]:
    """Keep the newest ``keep`` complete checkpoints; delete all older checkpoints, and return those deleted.

    Damaged checkpoints do not count, so a damaged newer checkpoint never displaces a complete older one. The running
    generation has the highest number, so its checkpoints are the newest. A job that fails again and again leaves an
    image each time, perhaps of a state that cannot train on: a newer image displaces older images before any save. Of
    the parts without COMMIT only the newest stays, and only if it is newer than the oldest complete checkpoint that
    stays.
    """
    whole = list(_valid(folder, read))
    images = [manifest.commit for manifest in whole if IMAGE in manifest.versions][1:]
    ranked = [manifest.commit for manifest in whole if manifest.commit not in images] + images
    gone, least = ranked[max(keep, 1) :], min(ranked[: max(keep, 1)], default=None)
    parts = partial(folder)
    gone += [commit for commit in parts if commit != parts[0] or (least is not None and commit < least)]
    for commit in gone:  # rename first: a half deleted folder must not look like a checkpoint
        os.replace(folder / str(commit), folder / f"{_DROPPED}{commit}")  # noqa: PTH105 - as above
    sweep(folder)
    return gone


def sweep(folder: Path) -> None:
    """Finish the deletion of old checkpoints, including those that a killed saver left half deleted."""
    for name in _listed(folder):
        if name.startswith(_DROPPED):
            beneath.remove(folder, name)


def partial(folder: Path | str) -> list[Commit]:
    """Return checkpoints without COMMIT whose part on this node is complete, newest first. Compares only sizes."""
    return [part.commit for part in _valid(folder, read_part) if not _there(folder, part.commit, COMMIT)]


def complete(folder: Path | str) -> list[Commit]:
    """Return checkpoints with a valid COMMIT, newest first. Compares only sizes of files."""
    return [manifest.commit for manifest in _valid(folder, read)]


def _valid(folder: Path | str, reader: Callable[[Path | str, Commit], Manifest]) -> Iterator[Manifest]:
    for commit in scan(folder):
        with contextlib.suppress(ValueError):
            yield reader(folder, commit)


def quarantine(folder: Path, commit: Commit) -> None:
    """Move an invalid checkpoint to quarantine; delete all but the two that were moved there last."""
    with contextlib.suppress(FileExistsError):
        (folder / QUARANTINE).mkdir(parents=True)
    number = 1 + max(map(_number, beneath.names(folder, QUARANTINE)), default=0)
    beneath.rename(folder, str(commit), f"{QUARANTINE}/{number}.{commit}")
    for name in sorted(beneath.names(folder, QUARANTINE), key=_number)[:-_QUARANTINED]:
        beneath.remove(folder, f"{QUARANTINE}/{name}")


def _number(name: str) -> int:
    head = name.split(".", 1)[0]
    return int(head) if head.isdecimal() and len(head) < 10 else 0


def quarantine_incomplete(folder: Path, besides: Collection[Commit] = ()) -> list[SkippedCheckpoint]:
    """Quarantine all checkpoints without COMMIT or PART, or with wrong file sizes, except those in ``besides``.

    ``besides``: checkpoints that are being written. No other may be.
    """
    moved = []
    for commit in scan(folder):
        if commit in besides:
            continue
        try:
            read_part(folder, commit)
        except ValueError as error:
            quarantine(folder, commit)
            moved.append(SkippedCheckpoint(str(commit), str(error)))
    return moved


def empty_quarantine(folder: Path) -> bool:
    """Delete the quarantine folder to free space on a full disk; return whether anything was in it."""
    if not _listed(folder, QUARANTINE):
        return False
    beneath.remove(folder, QUARANTINE)
    return True
