"""Pack a source folder as a tar whose bytes depend only on its content.

Equal files give an equal hash on every machine: names are sorted, times and owners left out, modes are 644 or 755.
Files that ``.spotkeeperignore`` excludes are left out. A folder without ``.spotkeeperignore`` uses its ``.gitignore``.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pathspec import GitIgnoreSpec
from pathspec.patterns.gitignore import GitIgnorePatternError

from spotkeeper.client.errors import CliError, Exit
from spotkeeper.contract.job import JobSpec

LIMIT_BYTES = 256 * 10**6  # limited, because every machine fetches the source at every boot
ALWAYS_OUT = GitIgnoreSpec.from_lines(
    [
        *(".git", ".hg/", ".svn/", ".venv/", ".spotkeeper/", ".DS_Store", ".ipynb_checkpoints/"),
        *("__pycache__/", "*.pyc", ".mypy_cache/", ".pytest_cache/", ".ruff_cache/"),
        "gha-creds-*.json",  # credentials that google-github-actions/auth leaves in a checkout
    ]
)


@dataclass(frozen=True)
class Source:
    """A packed folder: the tar, its SHA-256 in hex, and its number of files."""

    tar: bytes
    sha256: str
    files: int


def pack_source(file: Path, spec: JobSpec) -> Source | None:
    """Return the packed ``source`` folder of a job file; None if the job has no source. Raises as :func:`pack`."""
    return pack((file.resolve().parent / spec.source).resolve()) if spec.source is not None else None


def pack(folder: Path, limit_bytes: int = LIMIT_BYTES) -> Source:
    """Return the folder's tar.

    Raises:
        CliError: the folder is too large or empty, or has a link that leads out of it, an invalid ignore rule or a file
            that cannot be read.
    """
    try:
        return _pack(folder, limit_bytes)
    except OSError as error:
        raise CliError(
            f"{error.filename or folder}: cannot be read: {error.strerror}",
            Exit.USAGE,
            "make it readable or name it in .spotkeeperignore; if a program writes there now, submit again afterwards",
        ) from None


def _pack(folder: Path, limit_bytes: int) -> Source:
    names = sorted(_names(folder))
    if not names:
        raise CliError(f"{folder}: the ignore rules leave no file to send", Exit.USAGE)
    _check_size(folder, names, limit_bytes)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in names:
            _add(tar, folder, name)
    data = buffer.getvalue()
    return Source(data, hashlib.sha256(data).hexdigest(), len(names))


def _names(folder: Path) -> Iterator[str]:
    """Yield the relative paths of the files and links to pack, with forward slashes."""
    rules: dict[str, GitIgnoreSpec] = {}
    for root, folders, files in os.walk(folder, onerror=_refuse):
        here = PurePosixPath(Path(root).relative_to(folder).as_posix())
        rules[here.as_posix()] = _rules(Path(root))
        links = [name for name in folders if (Path(root) / name).is_symlink()]
        folders[:] = sorted(name for name in folders if name not in links and not _ignored(f"{here / name}/", rules))
        for name in (*files, *links):
            path = (here / name).as_posix()
            if not _ignored(path, rules) and _plain(Path(root) / name):
                yield path


def _refuse(error: OSError) -> None:
    """Raise the error of os.walk, which would otherwise silently skip a folder that cannot be read."""
    raise error


def _rules(folder: Path) -> GitIgnoreSpec:
    for name in (".spotkeeperignore", ".gitignore"):
        file = folder / name
        if file.is_file():
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            try:
                return GitIgnoreSpec.from_lines(lines)
            except GitIgnorePatternError:
                raise CliError(_no_rule(file, lines), Exit.USAGE, "correct the line or remove it") from None
    return GitIgnoreSpec.from_lines([])


def _no_rule(file: Path, lines: list[str]) -> str:
    for number, line in enumerate(lines, 1):
        try:
            GitIgnoreSpec.from_lines([line])
        except GitIgnorePatternError:
            return f"{file}:{number}: {line!r} is not a valid ignore rule"
    return f"{file}: has an invalid ignore rule"


def _ignored(path: str, rules: dict[str, GitIgnoreSpec]) -> bool:
    """Return whether ignore rules exclude the path; the innermost folder with a matching rule decides."""
    if ALWAYS_OUT.match_file(path):
        return True
    for parent in PurePosixPath(path).parents:
        base = parent.as_posix()
        inner = path if base == "." else path[len(base) + 1 :]
        if base in rules:
            included = rules[base].check_file(inner).include
            if included is not None:
                return included
    return False


def _plain(path: Path) -> bool:
    mode = path.lstat().st_mode
    return stat.S_ISREG(mode) or stat.S_ISLNK(mode)  # no sockets, pipes and devices


def _check_size(folder: Path, names: list[str], limit_bytes: int) -> None:
    sizes = {name: (folder / name).lstat().st_size for name in names}
    total = sum(sizes.values())
    if total <= limit_bytes:
        return
    largest = sorted(sizes, key=lambda name: (-sizes[name], name))[:3]
    lines = ", ".join(f"{name} ({_mb(sizes[name])})" for name in largest)
    raise CliError(
        f"{folder}: {_mb(total)} in {len(names)} files, at most {_mb(limit_bytes)} can be sent; largest: {lines}",
        Exit.USAGE,
        "name what the job does not need in .spotkeeperignore, and read data from a bucket instead",
    )


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def _add(tar: tarfile.TarFile, folder: Path, name: str) -> None:
    path = folder / name
    info = tarfile.TarInfo(name)
    if path.is_symlink():
        _check_link(folder, path, name)
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, str(path.readlink()), 0o777
        tar.addfile(info)
        return
    data = path.read_bytes()
    info.size = len(data)
    info.mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
    tar.addfile(info, io.BytesIO(data))


def _check_link(folder: Path, path: Path, name: str) -> None:
    target = path.readlink()
    try:
        leads = (path.parent / target).resolve()
    except RuntimeError:  # raised by Python before 3.13
        what = f"{folder}: {name} is a link to {target}, which leads back to the link"
        raise CliError(what, Exit.USAGE, "remove the link, or name it in .spotkeeperignore") from None
    if target.is_absolute() or not leads.is_relative_to(folder.resolve()):
        raise CliError(
            f"{folder}: {name} is a link to {target}, outside the folder",
            Exit.USAGE,
            "copy the link's target into the folder, or name the link in .spotkeeperignore",
        )
