"""Uploads the files in ``SPOTKEEPER_OUTPUT`` to ``jobs/<job>/out/<node>/`` before exit code 0 is reported.

The folder is on the job's data disk, so it outlives a machine. Until that disk is attached, a folder on the boot disk
takes its place. Object names contain the node, and only members of the newest generation upload, so two machines never
write different objects with the same name. The list of all files (``contract.uploads``) is written last.

Only the loop's thread may call ``Outputs``; a helper thread reads and sends the files. Files that are already in the
bucket are not sent again, so a restarted agent continues an upload.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from spotkeeper.clock import Clock
from spotkeeper.contract.generation import Progress
from spotkeeper.contract.uploads import Output, OutputFile
from spotkeeper.train.core import beneath
from spotkeeper_agent.cloud.storage import Bucket, FilePart, StorageError
from spotkeeper_agent.core.events import HelperThread, OutputThere
from spotkeeper_agent.core.log import Log
from spotkeeper_agent.host.mounting import make_job_folders
from spotkeeper_agent.job.jobhost import share

MOST_FILES = 10_000
MOST_FILES_READ, MOST_DEPTH = 100_000, 64
MOST_TOLD = 20  # maximum number of reported lines about files that are left out
PATIENCE_S = 900.0  # virtual; an upload fails if it adds no file to the bucket for this long
PATIENCE_FLOOR_S = 1.0  # real; lower limit of ``PATIENCE_S``
PAUSE_MOST_S = 15.0  # real; longest pause between two tries
BEAT_S = 60.0  # virtual; interval of signs of life
ASKED_BYTES = 256 << 10  # a smaller file is sent again without looking it up in the bucket
NAME = "out"
FAILED = 74  # EX_IOERR: the job ended well, but its output could not be uploaded
_MOST_NAME = 500  # bytes; stores allow 1,024 for the whole name
_NOT_PLAIN = re.compile(r"[^-A-Za-z0-9._/]+")


def folder_name(job: str, node: int) -> str:
    """Return the prefix that a node's output files have in the bucket."""
    return f"jobs/{job}/out/{node}/"


def list_name(job: str, node: int) -> str:
    return f"jobs/{job}/out/{node}.json"


def plain(path: str) -> str:
    """Return a file's name in the bucket: its path, made unique by a hash if it is long or has special characters."""
    name = _NOT_PLAIN.sub("_", path)
    if name == path and len(name) <= _MOST_NAME:
        return name
    folder, _, last = name.rpartition("/")
    mark = hashlib.sha256(path.encode()).hexdigest()[:12]
    name = f"{folder}/{mark}-{last}" if folder else f"{mark}-{last}"
    return name if len(name) <= _MOST_NAME else f"{mark}-{last[-200:]}"


@dataclass(frozen=True)
class Found:
    """One output file. ``path``: its path below the output folder; ``file``: the same path with links resolved."""

    path: str
    folder: Path
    file: str
    size: int
    changed: int  # nanoseconds

    def mark(self) -> tuple[str, int, int]:
        return str(self.folder / self.file), self.size, self.changed


def find(folders: tuple[Path, ...]) -> tuple[list[Found], list[str]]:
    """Return the files of these folders as one tree, sorted by path, and lines about files that are left out.

    If two folders have a file with the same path, the newer one counts. A link that stays in its folder
    counts as its target.

    Raises:
        OSError: a folder cannot be read.
    """
    found: dict[str, Found] = {}
    left_out: list[str] = []
    for folder in folders:
        for name in _walk(folder):
            one = _look(folder, name)
            if isinstance(one, str):
                left_out.append(one)
            elif name not in found or found[name].changed < one.changed:
                found[name] = one
    files = [found[name] for name in sorted(found)]
    if len(files) > MOST_FILES:
        left_out.append(f"{len(files) - MOST_FILES} files beyond the limit of {MOST_FILES}: pack several into one")
    return files[:MOST_FILES], left_out


def _walk(folder: Path) -> Iterator[str]:
    """Yield the paths of all entries below ``folder`` that are not folders. ``folder`` itself must not be a link."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name, _ in beneath.walk(folder.parent, folder.name, MOST_DEPTH, MOST_FILES_READ):
            yield name.partition("/")[2]


def _look(folder: Path, name: str) -> Found | str:
    """Return the file with links resolved (uploads follow none), or a line that says why the file is left out."""
    shown = name.encode("utf-8", "backslashreplace").decode()
    if shown != name:
        return f"{shown}: its name is not UTF-8"
    try:
        file = (folder / name).resolve(strict=True)
        about = file.stat()
    except (OSError, RuntimeError):
        return f"{shown}: a broken link"
    if not file.is_relative_to(folder.resolve()):
        return f"{shown}: a link out of the folder"
    if not stat.S_ISREG(about.st_mode):
        return f"{shown}: not a regular file"
    return Found(name, folder, file.relative_to(folder.resolve()).as_posix(), about.st_size, about.st_mtime_ns)


class OutputUpload:
    """Uploads one generation's output; call :meth:`work` until it succeeds. Any thread may set ``stop``."""

    def __init__(self, bucket: Bucket, job: str, node: int, gen: int, folders: tuple[Path, ...]) -> None:
        self.stop = threading.Event()
        self.gen = gen
        self.count = 0  # files in the bucket; the loop's thread reads it
        self._bucket = bucket
        self._job, self._node = job, node
        self._folders = folders
        self._there: dict[tuple[str, int, int], OutputFile] = {}  # files that a later try need not check

    def work(self) -> OutputThere:
        """Send the files that the bucket lacks, then the list of all files, if the output has any.

        Raises:
            StorageError: the bucket refused a file, or ``stop`` was set; try again.
            OSError: a file cannot be read.
        """
        files, left_out = find(self._folders)
        there = [self._there.get(found.mark()) or self._keep(found) for found in files]
        told = tuple(left_out[:MOST_TOLD])
        if len(left_out) > MOST_TOLD:
            told += (f"and {len(left_out) - MOST_TOLD} more",)
        if there or told:
            content = msgspec.json.encode(Output(self.gen, tuple(there), told))
            self._bucket.write(list_name(self._job, self._node), content)
        return OutputThere(self.gen, len(there), told)

    def _keep(self, found: Found) -> OutputFile:
        name = plain(found.path)
        target = folder_name(self._job, self._node) + name
        there = self._bucket.find(target) if found.size >= ASKED_BYTES else None
        fd = beneath.open_file(found.folder.parent, f"{found.folder.name}/{found.file}")
        with open(fd, "rb") as file:  # noqa: PTH123 - a descriptor
            local = FilePart(file, 0, found.size, self._check_stop)
            if there is not None and there.size == found.size and there.md5 == local.read_through():
                kept = OutputFile(found.path, name, found.size, there.md5)
            else:
                reader = FilePart(file, 0, found.size, self._check_stop)
                sent = self._bucket.send(target, reader)
                kept = OutputFile(found.path, name, found.size, reader.md5.hexdigest())
                if sent.size != kept.size or (sent.md5 and sent.md5 != kept.md5):
                    raise StorageError(f"{target}: the bucket's object ({sent.size} bytes) differs from what was sent")
        self._there[found.mark()] = kept
        self.count += 1
        return kept

    def _check_stop(self, _: int) -> None:
        if self.stop.is_set():
            raise StorageError("interrupted: the machine leaves the job or a newer generation begins")


@dataclass
class _Trouble:
    """Failed tries since the last uploaded file. ``since``: the first try's time; ``count``: files uploaded by then."""

    since: float
    count: int
    why: str
    pause_s: float = 1.0
    not_before: float = 0.0  # monotonic


@dataclass
class Outputs:
    """A machine's uploads of output, one at a time. ``spare``: folder on the boot disk for the time without a disk."""

    bucket: Bucket
    helper: HelperThread
    mount: Path
    spare: Path
    clock: Clock
    log: Log
    upload: OutputUpload | None = None
    _began: float = 0.0  # monotonic
    _told_at: float = float("-inf")  # virtual
    _progress: Progress | None = None
    _trouble: _Trouble | None = field(default=None)

    def folder(self, job: str, *, disk: bool) -> Path:
        """Make and return the output folder for a generation that begins now."""
        folder = self.mount / job / NAME if disk else self.spare / job
        try:
            folder.mkdir(parents=True, exist_ok=True)
            share(folder)
            if disk:
                make_job_folders(self.mount, job)  # the folders by which a static machine recognises a job
        except OSError as error:  # the job's own first write will fail and report it
            self.log("output.folder", error=str(error))
        return folder

    def begin(self, job: str, node: int, gen: int, progress: Progress) -> bool:
        """Begin to upload a generation's output; return False if the generation has no output.

        ``progress``: the generation's last progress, repeated during the upload as a sign of life.
        """
        folders = tuple(path for path in (self.mount / job / NAME, self.spare / job) if _holds(path))
        if not folders:
            return False
        self.upload = OutputUpload(self.bucket, job, node, gen, folders)
        self._began, self._told_at, self._progress = time.monotonic(), self.clock.steady(), progress
        self._trouble = None
        self.log("output.begin", gen=gen)
        return True

    def go_on(self) -> None:
        """Start the next try, unless a try is running or the pause after the last try is not over."""
        if self.upload is not None and (self._trouble is None or time.monotonic() >= self._trouble.not_before):
            self.helper.do("output", self.upload.work)

    def done(self, there: OutputThere) -> bool:
        """Handle the end of an upload; return False if that upload was dropped."""
        if self.upload is None or self.upload.gen != there.gen:
            return False
        self.log("output.there", gen=there.gen, files=there.files, left_out=list(there.left_out))
        self.upload = None
        return True

    def failed(self, why: str) -> str | None:
        """Handle a failed try. If the upload is given up, return the reason; otherwise None."""
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
        return f"the files in SPOTKEEPER_OUTPUT could not be uploaded to the bucket: {why}"

    def drop(self) -> None:
        """Drop the current upload, which stops at its next piece."""
        if self.upload is not None:
            self.upload.stop.set()
            self.log("output.dropped", gen=self.upload.gen)
            self.upload = None

    @property
    def busy(self) -> bool:
        """Whether the helper still reads the job's files."""
        return self.helper.busy("output")

    def beat(self) -> Progress | None:
        """Return the next sign of life, if due, so that a long upload does not count as a hang or a loss."""
        now = self.clock.steady()
        if self.upload is None or self._progress is None or now - self._told_at < BEAT_S:
            return None
        self._told_at = now
        taken = time.monotonic() - self._began
        return msgspec.structs.replace(self._progress, at=self.clock.now(), uploading_s=taken)

    def forget(self, job: str) -> None:
        """Delete a job's output from the boot disk. Output on the data disk is deleted with the job's folder there."""
        beneath.remove(self.spare, job)


def _holds(folder: Path) -> bool:
    try:
        return bool(beneath.names(folder.parent, folder.name, most=1))
    except OSError:
        return False
