"""The checkpoint folder on disk: what is in it, which is the newest that holds, what may go.

::

    <folder>/<generation>-<step>/   state.bin, skeleton.pkl, and last of all COMMIT
    <folder>/quarantine/            what was half-written or damaged, capped
    <folder>/latest                 a hint for people; nothing here reads it
    <folder>/.dropped-<name>        too old, and half deleted by a saver that was killed meanwhile

Of sharded state each node has a part: files of its own ranks, and PART once they are on
disk; COMMIT, which names the files of all nodes, follows when every node has said so. A
checkpoint of which every node has PART or COMMIT is complete, whoever was killed between.

``COMMIT`` is the only proof that a checkpoint is complete. It is written after all other
bytes are on disk, by temporary file, fsync, rename and fsync of the folder, and it
carries its own hash. Newest means the highest (generation, step): a disk that returns
may hold more steps of a timeline that was abandoned.

Standard library only: the agent asks here what its disk holds. Nothing here runs at the
same time as a writer of the same folder, but for ``newest`` and ``scan``, which only read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from spotkeeper.train.control import Commit

COMMIT = "COMMIT"
PART = "PART"
STATE = "state.bin"
SKELETON = "skeleton.pkl"
QUARANTINE = "quarantine"
LATEST = "latest"
FORMAT = 1

_CHUNK = 16 << 20
_DROPPED = ".dropped-"
_QUARANTINED = 2  # kept to be looked at; each may be as large as a checkpoint


class RottenError(ValueError):
    """All bytes could be read, and they are not the ones that were written: no second try helps."""


@dataclass(frozen=True)
class FileSum:
    """One file of a checkpoint."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Place:
    """Where one rank of the gang ran."""

    rank: int
    node: int  # torchrun's node_rank
    slot: int  # the job's rank (slot) of that node
    writes: bool  # whether that node wrote a copy of this checkpoint


@dataclass(frozen=True)
class Manifest:
    """What ``COMMIT`` says."""

    commit: Commit
    world: int
    gang: tuple[Place, ...]
    files: tuple[FileSum, ...]
    versions: dict[str, str]
    saved_at: float  # real unix seconds
    others: tuple[FileSum, ...] = ()  # of sharded state: the files that other nodes have

    def to_bytes(self) -> bytes:
        body = asdict(self) | {"format": FORMAT}
        return json.dumps({"sha256": _digest(body), "body": body}, indent=1).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Raises ValueError with what is wrong."""
        try:
            outer = json.loads(data)
            body = outer["body"]
            if outer["sha256"] != _digest(body):
                raise ValueError("COMMIT does not match its own hash")
            if body["format"] != FORMAT:
                raise ValueError(f"COMMIT has format {body['format']}, this library reads {FORMAT}")
            return cls(
                commit=Commit(**body["commit"]),
                world=body["world"],
                gang=tuple(Place(**place) for place in body["gang"]),
                files=tuple(FileSum(**file) for file in body["files"]),
                versions=body["versions"],
                saved_at=body["saved_at"],
                others=tuple(FileSum(**file) for file in body.get("others", ())),
            )
        except (TypeError, KeyError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"COMMIT is not readable: {error!r}") from None


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that was passed over, and why."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


@dataclass(frozen=True)
class Newest:
    """The answer of ``newest``."""

    manifest: Manifest | None
    skipped: tuple[Skipped, ...]  # newer ones that do not hold, newest first

    @property
    def commit(self) -> Commit | None:
        return None if self.manifest is None else self.manifest.commit


def newest(folder: Path | str, *, hashes: bool = True) -> Newest:
    """The newest checkpoint whose COMMIT holds, else the next older one.

    Args:
        folder: a checkpoint folder; it need not exist.
        hashes: read every byte and compare (about a second per GB). Without, sizes are
            compared: enough for an agent that only reports what its disk holds.
    """
    skipped: list[Skipped] = []
    for commit in scan(folder):
        try:
            manifest = read(folder, commit)
            if hashes:
                verify(folder, manifest)
        except ValueError as error:
            skipped.append(Skipped(str(commit), str(error)))
            continue
        return Newest(manifest, tuple(skipped))
    return Newest(None, tuple(skipped))


def scan(folder: Path | str) -> list[Commit]:
    """All checkpoints in ``folder``, complete or not, newest first."""
    names = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        names = os.listdir(folder)  # noqa: PTH208 - names, not paths
    return sorted((commit for name in names if (commit := Commit.parse(name))), reverse=True)


def read(folder: Path | str, commit: Commit) -> Manifest:
    """The manifest of one checkpoint, its files' sizes compared.

    Raises:
        ValueError: it is incomplete or damaged, with the reason.
    """
    home = Path(folder) / str(commit)
    if not _there(home / COMMIT) and _there(home / PART):
        raise ValueError("no COMMIT: this node's part is whole, but that all others are was not told here")
    return _read(home, commit, COMMIT)


def read_part(folder: Path | str, commit: Commit) -> Manifest:
    """What this node has of a checkpoint of sharded state, whether or not it is known that all others have theirs.

    Raises:
        ValueError: its own part is incomplete or damaged, with the reason.
    """
    home = Path(folder) / str(commit)
    return _read(home, commit, COMMIT if _there(home / COMMIT) else PART)


def _read(home: Path, commit: Commit, marker: str) -> Manifest:
    try:
        manifest = Manifest.from_bytes((home / marker).read_bytes())
    except FileNotFoundError:
        raise ValueError("no COMMIT: it was never finished") from None
    except OSError as error:
        raise ValueError(f"{marker}: {error.strerror}") from None
    if manifest.commit != commit:
        raise ValueError(f"{marker} is of {manifest.commit}, in the folder of {commit}")
    for file in manifest.files:
        try:
            size = (home / file.name).stat().st_size
        except OSError as error:
            raise ValueError(f"{file.name}: {error.strerror}") from None
        if size != file.bytes:
            raise ValueError(f"{file.name} has {size} bytes, {marker} says {file.bytes}")
    return manifest


def file_hash(path: Path, algorithm: str = "sha256") -> str:
    """Of a file's content, in hex. Raises OSError. (``hashlib.file_digest`` is not in Python 3.10.)"""
    found, buffer = hashlib.new(algorithm, usedforsecurity=False), bytearray(1 << 20)
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            found.update(memoryview(buffer)[:count])
    return found.hexdigest()


def verify(folder: Path | str, manifest: Manifest) -> None:
    """Read every byte. Raises ValueError with the file that cannot be read, RottenError with one that differs."""
    for file in manifest.files:
        try:
            digest = file_hash(Path(folder) / str(manifest.commit) / file.name)
        except OSError as error:
            raise ValueError(f"{file.name}: {error.strerror}") from None
        if digest != file.sha256:
            raise RottenError(f"{file.name} does not match its hash in COMMIT")


def read_into(folder: Path | str, manifest: Manifest, name: str, target: memoryview) -> None:
    """Read one file into ``target`` (of its size), hashing on the way.

    Raises:
        ValueError: it is unreadable.
        RottenError: it is short, or differs from its hash.
    """
    file = next(file for file in manifest.files if file.name == name)
    digest = hashlib.sha256()
    at = 0
    try:
        with (Path(folder) / str(manifest.commit) / name).open("rb", buffering=0) as stream:
            while at < file.bytes and (count := stream.readinto(target[at : min(at + _CHUNK, file.bytes)])):
                digest.update(target[at : at + count])
                at += count
    except OSError as error:
        raise ValueError(f"{name}: {error.strerror}") from None
    if at != file.bytes or digest.hexdigest() != file.sha256:
        raise RottenError(f"{name} does not match its hash in COMMIT")


def publish(home: Path, manifest: Manifest) -> None:
    """Write COMMIT, last and durably. All other files are on disk already."""
    replace(home / COMMIT, manifest.to_bytes())
    sync_folder(home.parent)  # the folder's own name
    with contextlib.suppress(OSError):  # the checkpoint is complete without: COMMIT says what PART did
        (home / PART).unlink(missing_ok=True)
        replace(home.parent / LATEST, f"{manifest.commit}\n".encode(), durably=False)  # somebody waits for COMMIT alone


def publish_part(home: Path, manifest: Manifest) -> None:
    """Write PART, durably. All other files of this node are on disk already."""
    replace(home / PART, manifest.to_bytes())
    sync_folder(home.parent)


def replace(path: Path, data: bytes, *, durably: bool = True) -> None:
    """Write ``path`` whole or not at all: temporary file, fsync, rename, fsync of the folder.

    ``durably=False``: without the two fsyncs; a crash of the machine may take it back.
    """
    temporary = path.with_name(path.name + ".tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        while data:  # a disk that fills up takes a part, and says so with the next
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
    """Checkpoints newer than this that were whole once and are no more (by sizes), here or put aside, newest first.

    One that was never finished has no COMMIT: nobody has ever counted on it.
    """
    put_aside = [path.name.partition(".")[2] for path in _listed(folder / QUARANTINE) if _there(path / COMMIT)]
    here = [path.name for path in _listed(folder) if _there(path / COMMIT)]
    found = {commit for name in (*put_aside, *here) if (commit := Commit.parse(name))}
    return sorted((commit for commit in found if since is None or commit > since), reverse=True)


def _there(path: Path) -> bool:
    """Not where the disk cannot tell (EIO, EUCLEAN): ``Path.exists`` would raise, and one bad folder end the run."""
    try:
        path.stat()
    except OSError:
        return False
    return True


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def prune(folder: Path, keep: int) -> list[Commit]:
    """Drop checkpoints beyond the newest ``keep`` complete ones. Returns what went.

    Only complete ones count, so a damaged newest never costs a good older one; and since
    the running generation is the highest, its own are the last to go. Of parts that never
    got their COMMIT only the newest can still be of use, and not below what is complete.
    """
    whole = complete(folder)
    gone, least = whole[max(keep, 1) :], min(whole[: max(keep, 1)], default=None)
    parts = partial(folder)
    gone += [commit for commit in parts if commit != parts[0] or (least is not None and commit < least)]
    for commit in gone:  # a rename first: half a removal looks neither complete nor never finished
        os.replace(folder / str(commit), folder / f"{_DROPPED}{commit}")  # noqa: PTH105 - as above
    sweep(folder)
    return gone


def sweep(folder: Path) -> None:
    """Delete what has been dropped; a saver that was killed may have left some of it."""
    for path in folder.glob(f"{_DROPPED}*"):
        shutil.rmtree(path, ignore_errors=True)


def partial(folder: Path | str) -> list[Commit]:
    """Checkpoints of sharded state without a COMMIT of which this node's part holds, by sizes, newest first."""
    found = []
    for commit in scan(folder):
        with contextlib.suppress(ValueError):
            if not _there(Path(folder) / str(commit) / COMMIT):
                found.append(read_part(folder, commit).commit)
    return found


def complete(folder: Path | str) -> list[Commit]:
    """Checkpoints whose COMMIT holds, by sizes, newest first."""
    found = []
    for commit in scan(folder):
        with contextlib.suppress(ValueError):
            found.append(read(folder, commit).commit)
    return found


def quarantine(folder: Path, commit: Commit) -> None:
    """Move a checkpoint that does not hold out of the way, to be looked at; only the last few stay."""
    home = folder / QUARANTINE
    home.mkdir(parents=True, exist_ok=True)
    number = 1 + max((_number(path) for path in home.iterdir()), default=0)
    os.replace(folder / str(commit), home / f"{number}.{commit}")  # noqa: PTH105 - as above
    for path in sorted(home.iterdir(), key=_number)[:-_QUARANTINED]:
        shutil.rmtree(path, ignore_errors=True)


def _number(path: Path) -> int:
    head = path.name.split(".", 1)[0]
    return int(head) if head.isdigit() else 0


def quarantine_incomplete(folder: Path) -> list[Skipped]:
    """Move all checkpoints without a COMMIT or PART that holds (by sizes). Only while nobody writes here."""
    moved = []
    for commit in scan(folder):
        try:
            read_part(folder, commit)
        except ValueError as error:
            quarantine(folder, commit)
            moved.append(Skipped(str(commit), str(error)))
    return moved


def empty_quarantine(folder: Path) -> bool:
    """Make room on a full disk. Returns whether there was anything."""
    home = folder / QUARANTINE
    if not home.is_dir() or not any(home.iterdir()):
        return False
    shutil.rmtree(home, ignore_errors=True)
    return True


def _digest(body: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
