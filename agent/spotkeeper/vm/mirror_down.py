"""A checkpoint's copy from the bucket onto this machine's disk, every byte compared while it is written.

It appears in the checkpoint folder by one rename, whole or not at all; before that it is in ``.fetch`` beside it, which
no reader of checkpoints looks at. For one helper thread, while no trainer runs here.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
from pathlib import Path

import msgspec

from spotkeeper.spec import codec
from spotkeeper.spec.mirror import MirrorFile, MirrorList, list_name, part_names, part_size
from spotkeeper.train import store
from spotkeeper.train.control import Commit
from spotkeeper.train.store import COMMIT, Manifest, file_hash
from spotkeeper.vm.events import Fetched
from spotkeeper.vm.storage import Bucket, MissingError, StorageError

FOLDER = ".fetch"
_TRIES = 2  # of a file that arrived damaged: once may be the way


class NoCopyError(Exception):
    """The copy in the bucket is damaged, or gone: trying again does not help."""


class Download:
    """Tried until it is on the disk. ``stop`` is anybody's; ``count``: bytes that came; ``over``: the loop's."""

    def __init__(self, bucket: Bucket, job: str, commit: Commit, source: int, ckpt: Path) -> None:
        self.stop = threading.Event()
        self.commit = commit
        self.count = 0
        self.over = False
        self._bucket, self._job, self._source, self._ckpt = bucket, job, source, ckpt

    def work(self) -> Fetched:
        """
        Raises:
            NoCopyError: there is no such copy, or it is damaged.
            StorageError: the bucket does not answer, or ``stop`` was set; try again.
            OSError: the disk takes it not.
        """
        if self.commit in store.complete(self._ckpt):
            return Fetched(self.commit)
        try:
            listed = self._list()
            home = self._ckpt / FOLDER / str(self.commit)
            _make_room(home.parent, home)
            for file in listed.files:
                self._file(file, listed, home)
        except MissingError as error:
            raise NoCopyError(str(error)) from None
        self._publish(home, listed.commit.encode())
        return Fetched(self.commit)

    def _list(self) -> MirrorList:
        name = list_name(self._job, str(self.commit), self._source)
        try:
            listed = codec.decode(b"".join(self._bucket.read(name)), MirrorList)
            manifest = Manifest.from_bytes(listed.commit.encode())
        except (msgspec.DecodeError, ValueError) as error:
            raise NoCopyError(f"{name} makes no sense: {error}") from None
        sums = tuple(MirrorFile(file.name, file.bytes, file.sha256) for file in manifest.files)
        if manifest.commit != self.commit or sums != listed.files or not all(_plain(file.name) for file in sums):
            raise NoCopyError(f"{name} is not of the checkpoint that it holds")
        return listed

    def _file(self, file: MirrorFile, listed: MirrorList, home: Path) -> None:
        """One file, where it is not there yet from an earlier try."""
        target = home / file.name
        if target.is_file() and target.stat().st_size == file.size and file_hash(target) == file.sha256:
            return
        for _ in range(_TRIES):
            if self._write(file, listed, target) == file.sha256:
                return
        raise NoCopyError(f"{self.commit}: {file.name} is not what COMMIT says")

    def _write(self, file: MirrorFile, listed: MirrorList, target: Path) -> str:
        """What the bucket has of a file; its hash, or "" where it has not so many bytes."""
        digest = hashlib.sha256()
        names = part_names(self._job, str(self.commit), listed.rank, file, listed.part_bytes)
        with target.open("wb") as out:
            for number, name in enumerate(names):
                got = 0
                for piece in self._bucket.read(name):
                    if self.stop.is_set():
                        raise StorageError("broken off: nobody wants it any more")
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
        """All files are on disk; COMMIT, then the folder's own name."""
        store.replace(home / COMMIT, proof)
        if (self._ckpt / str(self.commit)).exists():  # it does not hold, or nothing had been fetched
            store.quarantine(self._ckpt, self.commit)
        home.rename(self._ckpt / str(self.commit))
        store.sync_folder(self._ckpt)
        with contextlib.suppress(OSError):
            home.parent.rmdir()


def _make_room(folder: Path, home: Path) -> None:
    """What is left of another fetch goes; what is left of this one is used."""
    home.mkdir(parents=True, exist_ok=True)
    for other in folder.iterdir():
        if other != home:
            shutil.rmtree(other, ignore_errors=True)


def _plain(name: str) -> bool:
    """A file of the folder itself: names come from a bucket that machines write to."""
    return name not in ("", ".", "..", COMMIT) and "/" not in name and "\0" not in name
