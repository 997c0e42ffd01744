"""Fetches a job's source by its hash, verifies it before use, and unpacks it safely.

Each archive is unpacked once, into a folder that gets the archive's hash as its name when it is complete. A static
machine deletes all sources when it leaves a job.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from spotkeeper.train.core import beneath
from spotkeeper_agent.cloud.storage import Bucket
from spotkeeper_agent.job import jobhost


class SourceError(Exception):
    """An archive does not match its hash, or cannot be unpacked safely."""


class HashError(SourceError):
    """An object's content does not match the hash in its name."""


@contextlib.contextmanager
def verified(bucket: Bucket, name: str, sha256: str, folder: Path) -> Iterator[IO[bytes]]:
    """Yield an object of the bucket as a temporary file in ``folder``, after its hash is verified.

    Raises:
        HashError: the content does not match the hash.
        StorageError: the object could not be read; try again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        digest = hashlib.sha256()
        for piece in bucket.read(name):
            digest.update(piece)
            file.write(piece)
        if digest.hexdigest() != sha256:
            raise HashError(f"{name}: not used, because its hash is {digest.hexdigest()}")
        file.seek(0)
        yield file


def fetch(bucket: Bucket, job: str, sha256: str | None, folder: Path) -> Path:
    """Fetch and unpack a source; return ``<folder>/<sha256>``, or an empty folder for a job without source.

    Raises:
        SourceError: the content does not match the hash, or the archive would write outside its folder.
        StorageError: the archive could not be read; try again.
    """
    target = folder / (sha256 or "none")
    if target.is_dir():
        return target
    if sha256 is None:
        target.mkdir(parents=True, exist_ok=True)
        share(target)
        return target
    with verified(bucket, f"jobs/{job}/source/{sha256}", sha256, folder) as file:
        _unpack(file, target)
    return target


def forget_all(folder: Path) -> None:
    """Delete all sources, including incomplete ones, on a machine on which no job runs.

    The folder is renamed before it is deleted, so that no fetch finds a source of which only a part is left.

    Raises:
        OSError: the folder cannot be renamed.
    """
    with contextlib.suppress(FileNotFoundError):
        folder.rename(folder.with_name(f"{folder.name}.gone.{secrets.token_hex(8)}"))
    for gone in folder.parent.glob(
        f"{folder.name}.gone.*"
    ):  # also earlier ones, since a job may have prevented their deletion
        beneath.remove(gone.parent, gone.name)


def _unpack(archive: IO[bytes], target: Path) -> None:
    partial = Path(tempfile.mkdtemp(dir=target.parent, prefix="unpack-"))
    try:
        with tarfile.open(fileobj=archive) as tar:
            extract(tar, partial)
        share(partial)
        partial.rename(target)
    except (tarfile.TarError, OSError) as error:
        if not target.is_dir():  # an earlier agent may have unpacked it meanwhile
            raise SourceError(f"{target.name}: cannot unpack: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def share(folder: Path) -> None:
    """Give the folder to the jobs' group, because under systemd a job runs as another user than the agent."""
    for root, _, files in os.walk(folder):  # follows no links; no job can replace a file yet
        for path in (Path(root), *(Path(root, name) for name in files)):
            jobhost.share(path)


def extract(tar: tarfile.TarFile, folder: Path) -> None:
    """Unpack an archive into ``folder``. Devices, and paths and links that lead outside, are errors.

    Python's own filter for this came with 3.11.4, but Debian 12 has an older Python 3.11.

    Raises:
        tarfile.TarError: a member would lead outside; the message names it.
        OSError: a file cannot be written.
    """
    if hasattr(tarfile, "data_filter"):
        tar.extractall(folder, filter="data")
        return
    for member in tar:
        _check(member, folder)
        member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
        member.uid, member.gid, member.uname, member.gname = os.getuid(), os.getgid(), "", ""
        tar.extract(member, folder)


def _check(member: tarfile.TarInfo, folder: Path) -> None:
    """Check where a member's path leads on the disk: an earlier member may have put a link into the path."""
    leads = [folder / member.name]
    if member.issym():
        leads.append(folder / Path(member.name).parent / member.linkname)
    elif member.islnk():
        leads.append(folder / member.linkname)
    elif not (member.isfile() or member.isdir()):
        raise tarfile.ExtractError(f"{member.name!r} is neither file, folder nor link")
    if not all(path.resolve().is_relative_to(folder.resolve()) for path in leads):
        raise tarfile.ExtractError(f"{member.name!r} would lead outside")
