"""A job's source: fetched by its hash, verified before anything of it is used, unpacked safely.

Unpacked once per hash; a folder that is there under its final name is complete. A static node lives for
months: once it has let go of a job, it keeps none.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tarfile
import tempfile
from pathlib import Path

from spotkeeper.vm.storage import Bucket


class SourceError(Exception):
    """The source is not what was submitted."""


def fetch(bucket: Bucket, job: str, sha256: str | None, folder: Path) -> Path:
    """The folder in which the job runs: ``<folder>/<sha256>``, or an empty one for a job without source.

    Raises:
        SourceError: the hash differs, or the archive would write outside its folder.
        StorageError: it could not be read; try again.
    """
    target = folder / (sha256 or "none")
    if target.is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    if sha256 is None:
        target.mkdir(exist_ok=True)
        return target
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".tar") as file:
        digest = hashlib.sha256()
        for piece in bucket.read(f"jobs/{job}/source/{sha256}"):
            digest.update(piece)
            file.write(piece)
        file.flush()
        if digest.hexdigest() != sha256:
            raise SourceError(f"jobs/{job}/source/{sha256}: its hash is {digest.hexdigest()}; not unpacked")
        _unpack(Path(file.name), target)
    return target


def forget_all(folder: Path) -> None:
    """Delete all sources, also what a kill has left half done. For a machine on which no job runs.

    First they lose their names, all at once: half of a source must never be taken for the whole.

    Raises:
        OSError: something of an earlier time cannot be deleted.
    """
    gone = folder.with_name(f"{folder.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _unpack(archive: Path, target: Path) -> None:
    partial = Path(tempfile.mkdtemp(dir=target.parent, prefix="unpack-"))
    try:
        with tarfile.open(archive) as tar:
            extract(tar, partial)
        share(partial)
        partial.rename(target)
    except (tarfile.TarError, OSError) as error:
        if not target.is_dir():  # another agent of this machine may have been faster
            raise SourceError(f"{target.name}: cannot unpack: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def share(folder: Path) -> None:
    """Let the jobs' group work in it: where systemd runs, a job is another user than the agent."""
    for root, _, files in os.walk(folder):  # follows no links
        Path(root).chmod(0o775)
        for name in files:
            path = Path(root, name)
            if not path.is_symlink():
                path.chmod(0o775 if path.stat().st_mode & 0o100 else 0o664)


def extract(tar: tarfile.TarFile, folder: Path) -> None:
    """All of an archive, but nothing outside ``folder``: paths and links that lead there, and devices, are errors.

    Python has this as a filter since 3.11.4; the Python 3.11 of Debian 12 is older and has none.

    Raises:
        tarfile.TarError: naming the member that would lead outside.
        OSError: it cannot be written.
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
    """Against what is on the disk by now: an earlier member may be a link on this one's way."""
    leads = [folder / member.name]
    if member.issym():
        leads.append(folder / Path(member.name).parent / member.linkname)
    elif member.islnk():
        leads.append(folder / member.linkname)
    elif not (member.isfile() or member.isdir()):
        raise tarfile.ExtractError(f"{member.name!r} is neither file, folder nor link")
    if not all(path.resolve().is_relative_to(folder.resolve()) for path in leads):
        raise tarfile.ExtractError(f"{member.name!r} would lead outside")
