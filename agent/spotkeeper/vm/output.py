"""What a job left in ``SPOTKEEPER_OUTPUT``, carried to ``jobs/<job>/out/<rank>/`` before its exit 0 is said.

The folder is on the job's data disk, so that it outlives a machine; while that disk is not attached it is on the
boot disk. Names hold the rank, and only a member of the newest generation is asked for its end, so no two machines
write the same name but to repeat it. The list of all files (``spec.output``) is written last.

``Outputs`` is for the loop's thread; the files are read and sent by a helper. What is there already is not sent
again, so that an agent that was killed simply begins anew.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec

from spotkeeper.clock import Clock
from spotkeeper.spec.generation import Progress
from spotkeeper.spec.output import Output, OutputFile
from spotkeeper.vm.events import OutputThere
from spotkeeper.vm.helper import Helper
from spotkeeper.vm.log import Log
from spotkeeper.vm.storage import CHUNK, Bucket, StorageError

MOST_FILES = 10_000
MOST_TOLD = 20  # of what is left out, each in a line
PATIENCE_S = 900.0  # virtual; without a file that came through
PATIENCE_FLOOR_S = 1.0  # real
PAUSE_MOST_S = 15.0  # real, between two tries
BEAT_S = 60.0  # virtual
ASKED_BYTES = 256 << 10  # a smaller file is sent again sooner than it is asked for
NAME = "out"
FAILED = 74  # EX_IOERR, as a shell shows it: the job ended well, but what it left could not be kept
_MOST_NAME = 500  # bytes; stores take 1,024 for all of it
_NOT_PLAIN = re.compile(r"[^-A-Za-z0-9._/]+")


def folder_name(job: str, rank: int) -> str:
    """Of a rank's files in the bucket."""
    return f"jobs/{job}/out/{rank}/"


def list_name(job: str, rank: int) -> str:
    return f"jobs/{job}/out/{rank}.json"


def plain(path: str) -> str:
    """``path`` as a name in the bucket: itself, where it is one; else close to it, and no other path's."""
    name = _NOT_PLAIN.sub("_", path)
    if name == path and len(name) <= _MOST_NAME:
        return name
    folder, _, last = name.rpartition("/")
    mark = hashlib.sha256(path.encode()).hexdigest()[:12]
    name = f"{folder}/{mark}-{last}" if folder else f"{mark}-{last}"
    return name if len(name) <= _MOST_NAME else f"{mark}-{last[-200:]}"


@dataclass(frozen=True)
class Found:
    """One file of the job's. ``path``: below its folder, with ``/``; ``file``: where its bytes are."""

    path: str
    file: Path
    size: int
    changed: int  # nanoseconds

    def mark(self) -> tuple[str, int, int]:
        return str(self.file), self.size, self.changed


def find(folders: tuple[Path, ...]) -> tuple[list[Found], list[str]]:
    """All files of these folders as if they were one, by path, and what is left out, with the reason.

    Of two files of one path it is the newer one. A link counts as the file it leads to, inside its folder only.

    Raises:
        OSError: a folder cannot be read.
    """
    found: dict[str, Found] = {}
    left_out: list[str] = []
    for folder in folders:
        for path in _walk(folder):
            name = path.relative_to(folder).as_posix()
            one = _look(folder, name)
            if isinstance(one, str):
                left_out.append(one)
            elif name not in found or found[name].changed < one.changed:
                found[name] = one
    files = [found[name] for name in sorted(found)]
    if len(files) > MOST_FILES:
        left_out.append(f"{len(files) - MOST_FILES} files more than the {MOST_FILES} that are kept: pack them into one")
    return files[:MOST_FILES], left_out


def _walk(folder: Path) -> Iterator[Path]:
    """Everything but folders."""

    def fail(error: OSError) -> None:
        raise error

    if not folder.is_dir():
        return
    for top, folders, files in os.walk(folder, onerror=fail):
        links = [name for name in folders if (Path(top) / name).is_symlink()]
        yield from (Path(top) / name for name in (*files, *links))


def _look(folder: Path, name: str) -> Found | str:
    """The file, or why it is none. Nothing of the job runs any more, so nothing is exchanged meanwhile."""
    shown = name.encode("utf-8", "backslashreplace").decode()
    if shown != name:
        return f"{shown}: its name is no UTF-8"
    try:
        file = (folder / name).resolve(strict=True)
        about = file.stat()
    except (OSError, RuntimeError):
        return f"{shown}: a link that leads nowhere"
    if not file.is_relative_to(folder.resolve()):
        return f"{shown}: a link that leads out of the folder"
    if not stat.S_ISREG(about.st_mode):
        return f"{shown}: no file"
    return Found(name, file, about.st_size, about.st_mtime_ns)


class _Reader:
    """A file on its way: counted, hashed, and broken off by ``stop``. It never has more bytes than it said."""

    def __init__(self, file: IO[bytes], size: int, stop: threading.Event) -> None:
        self._file = file
        self._left = size
        self._size = size
        self._stop = stop
        self.md5 = hashlib.md5(usedforsecurity=False)

    def __len__(self) -> int:
        return self._size

    def read(self, size: int = -1, /) -> bytes:
        if self._stop.is_set():
            raise StorageError("broken off: the machine or the generation is given up")
        piece = self._file.read(self._left if size < 0 else min(size, self._left))
        self._left -= len(piece)
        self.md5.update(piece)
        return piece


class Upload:
    """One generation's, tried until all is there. For one helper thread; ``stop`` is anybody's."""

    def __init__(self, bucket: Bucket, job: str, rank: int, gen: int, folders: tuple[Path, ...]) -> None:
        self.stop = threading.Event()
        self.gen = gen
        self.count = 0  # files that are there: read by the loop's thread
        self._bucket = bucket
        self._job, self._rank = job, rank
        self._folders = folders
        self._there: dict[tuple[str, int, int], OutputFile] = {}  # not looked at again by a later try

    def work(self) -> OutputThere:
        """Send what is not there yet, then the list. A job that left nothing has no list.

        Raises:
            StorageError: the bucket took something not, or ``stop`` was set; try again.
            OSError: a file cannot be read.
        """
        files, left_out = find(self._folders)
        there = [self._there.get(found.mark()) or self._keep(found) for found in files]
        told = tuple(left_out[:MOST_TOLD])
        if len(left_out) > MOST_TOLD:
            told += (f"and {len(left_out) - MOST_TOLD} more",)
        if there or told:
            content = msgspec.json.encode(Output(self.gen, tuple(there), told))
            self._bucket.write(list_name(self._job, self._rank), content)
        return OutputThere(self.gen, len(there), told)

    def _keep(self, found: Found) -> OutputFile:
        name = plain(found.path)
        target = folder_name(self._job, self._rank) + name
        there = self._bucket.find(target) if found.size >= ASKED_BYTES else None
        with found.file.open("rb") as file:
            if there is not None and there.size == found.size and there.md5 == self._md5(file, found.size):
                kept = OutputFile(found.path, name, found.size, there.md5)
            else:
                file.seek(0)
                reader = _Reader(file, found.size, self.stop)
                sent = self._bucket.send(target, reader)
                kept = OutputFile(found.path, name, found.size, reader.md5.hexdigest())
                if sent.size != kept.size or (sent.md5 and sent.md5 != kept.md5):
                    raise StorageError(f"{target}: the bucket has {sent.size} bytes of it, or others than were sent")
        self._there[found.mark()] = kept
        self.count += 1
        return kept

    def _md5(self, file: IO[bytes], size: int) -> str:
        reader = _Reader(file, size, self.stop)
        while reader.read(CHUNK):
            pass
        return reader.md5.hexdigest()


@dataclass
class _Trouble:
    """``since``: steady virtual seconds of the first try in vain since a file came through; ``count``: by then."""

    since: float
    count: int
    why: str
    pause_s: float = 1.0
    not_before: float = 0.0  # monotonic


@dataclass
class Outputs:
    """Of one machine; at most one upload at a time. ``spare``: where jobs write while their disk is not attached."""

    bucket: Bucket
    helper: Helper
    mount: Path
    spare: Path
    clock: Clock
    log: Log
    upload: Upload | None = None
    _began: float = 0.0  # monotonic
    _told_at: float = float("-inf")  # virtual
    _progress: Progress | None = None
    _trouble: _Trouble | None = field(default=None)

    def folder(self, job: str, *, disk: bool) -> Path:
        """Where a generation that begins now writes to; made here, as far as the disk allows."""
        folder = self.mount / job / NAME if disk else self.spare / job
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if disk:
                (self.mount / job / "ckpt").mkdir(exist_ok=True)  # by it a static node knows a job's folder (mounting)
        except OSError as error:  # the job is told by its own first write
            self.log("output.folder", error=str(error))
        return folder

    def begin(self, job: str, rank: int, gen: int, progress: Progress) -> bool:
        """Carry what this generation left; False where it left nothing, which takes no time.

        ``progress``: the last of the generation, told again and again meanwhile.
        """
        folders = tuple(path for path in (self.mount / job / NAME, self.spare / job) if _holds(path))
        if not folders:
            return False
        self.upload = Upload(self.bucket, job, rank, gen, folders)
        self._began, self._told_at, self._progress = time.monotonic(), self.clock.steady(), progress
        self._trouble = None
        self.log("output.begin", gen=gen)
        return True

    def go_on(self) -> None:
        """The next try, where none is under way."""
        if self.upload is not None and (self._trouble is None or time.monotonic() >= self._trouble.not_before):
            self.helper.do("output", self.upload.work)

    def done(self, there: OutputThere) -> bool:
        """All is in the bucket. False: of an upload that was dropped."""
        self.helper.done("output")
        if self.upload is None or self.upload.gen != there.gen:
            return False
        self.log("output.there", gen=there.gen, files=there.files, left_out=list(there.left_out))
        self.upload = None
        return True

    def failed(self, why: str) -> str | None:
        """A try was in vain. Why the whole is given up, once it has been so for too long."""
        self.helper.done("output", why)
        upload, now = self.upload, self.clock.steady()
        if upload is None:
            return None
        trouble = self._trouble
        if trouble is None or trouble.count < upload.count:
            trouble = self._trouble = _Trouble(now, upload.count, why)
        trouble.why = why
        trouble.not_before = time.monotonic() + trouble.pause_s
        trouble.pause_s = min(PAUSE_MOST_S, 2 * trouble.pause_s)
        if self.clock.real_s(now - trouble.since) < max(self.clock.real_s(PATIENCE_S), PATIENCE_FLOOR_S):
            return None
        self.upload = None
        return f"what the job left in SPOTKEEPER_OUTPUT could not be brought to the bucket: {why}"

    def drop(self) -> None:
        """Nobody wants it any more: what is under way is broken off, at its next piece."""
        if self.upload is not None:
            self.upload.stop.set()
            self.log("output.dropped", gen=self.upload.gen)
            self.upload = None

    @property
    def busy(self) -> bool:
        """Whether a helper still reads the job's files."""
        return self.helper.busy("output")

    def beat(self) -> Progress | None:
        """A sign of life, if it is time: a job whose output takes long neither hangs nor is lost."""
        now = self.clock.steady()
        if self.upload is None or self._progress is None or now - self._told_at < BEAT_S:
            return None
        self._told_at = now
        taken = time.monotonic() - self._began
        return msgspec.structs.replace(self._progress, at=self.clock.now(), uploading_s=taken)

    def forget(self, job: str) -> None:
        """What is on the boot disk goes; what is on the data disk goes with the job's folder there."""
        shutil.rmtree(self.spare / job, ignore_errors=True)


def _holds(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is not None
    except OSError:
        return False
