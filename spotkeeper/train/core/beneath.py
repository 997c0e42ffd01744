"""Safe access to files in folders that others can write: follows no link, waits for no pipe, bounds every read.

A user who can write a folder can put a link, a pipe, a device or a terabyte under any name in it at any moment. The
agent shares folders with its jobs and makes all reads, writes, renames and deletes there through this module. Each
function takes a ``base``, whose own path others cannot change, and a relative ``name``. Every component below the base
is opened by descriptor with O_NOFOLLOW, and only regular files are opened.

Standard library only: the module also runs in the job's Python.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

MOST_NAMES = 10_000  # entries read from one folder, or in one walk
MOST_DEPTH = 32
# Bound at import, so that tests that patch the writing calls of ``os`` (to count them or make them fail) do not affect
# these two.
_open, _close = os.open, os.close
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_REMOVE_S = 600.0


@contextlib.contextmanager
def folder(base: Path | str, name: str = "") -> Iterator[int]:
    """Open a folder for the ``with`` block and yield its descriptor.

    Raises:
        OSError: a component is missing, a link, or not a folder.
        ValueError: the name leads outside ``base``.
    """
    fd = open_folder(base, name)
    try:
        yield fd
    finally:
        _close(fd)


def open_folder(base: Path | str, name: str = "") -> int:
    """Open a folder and return its descriptor, which the caller closes. Raises OSError, ValueError."""
    fd = _open(base, _FOLDER & ~os.O_NOFOLLOW)
    for step in _steps(name):
        try:
            below = _open(step, _FOLDER, dir_fd=fd)
        finally:
            _close(fd)
        fd = below
    return fd


def open_file(base: Path | str, name: str, flags: int = os.O_RDONLY, mode: int = 0o644) -> int:
    """Open a regular file and return its descriptor.

    Raises:
        OSError: the file is missing, a link, or not a regular file (EINVAL).
        ValueError: the name leads outside ``base``.
    """
    above, last = _split(name)
    with folder(base, above) as fd:
        file = _open(last, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode, dir_fd=fd)
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    _close(file)
    raise OSError(errno.EINVAL, "is not a regular file", str(Path(base) / name))


def read(base: Path | str, name: str, most: int) -> bytes:
    """Read a whole file.

    Raises:
        OSError: see :func:`open_file`; or the file has more than ``most`` bytes (EFBIG).
        ValueError: the name leads outside ``base``.
    """
    with open(open_file(base, name), "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"has more than {most} bytes", str(Path(base) / name))
    return content


def tail(base: Path | str, name: str, most: int) -> tuple[bytes, int]:
    """Read the last ``most`` bytes of a file; return them and their offset. Raises OSError, ValueError."""
    with open(open_file(base, name), "rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - most)
        file.seek(start)
        return file.read(most), start


def size(base: Path | str, name: str) -> int:
    """Return the size of a regular file in bytes, without opening it. Raises OSError, ValueError."""
    about = status(base, name)
    if not stat.S_ISREG(about.st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(Path(base) / name))
    return about.st_size


def status(base: Path | str, name: str) -> os.stat_result:
    """Return the ``lstat`` of a name; for a link it describes the link itself. Raises OSError, ValueError."""
    above, last = _split(name)
    with folder(base, above) as fd:
        return os.stat(last, dir_fd=fd, follow_symlinks=False)


def names(base: Path | str, name: str = "", most: int = MOST_NAMES) -> list[str]:
    """Return the names in a folder, at most ``most`` of them. Raises OSError, ValueError."""
    found: list[str] = []
    with folder(base, name) as fd, os.scandir(fd) as entries:
        for entry in entries:
            if len(found) == most:
                break
            found.append(entry.name)
    return found


def walk(
    base: Path | str, name: str = "", depth: int = MOST_DEPTH, most: int = MOST_NAMES
) -> Iterator[tuple[str, os.stat_result]]:
    """Walk the files below ``name``, at most ``depth`` folders deep and ``most`` entries in all; the rest is skipped.

    Yields:
        The path below ``base``, and its ``lstat``.

    Raises:
        OSError: a folder cannot be read.
        ValueError: the name leads outside ``base``.
    """
    todo, count = [(name, 0)], 0
    while todo:
        above, level = todo.pop()
        with folder(base, above) as fd:
            for last in sorted(_listed(fd, most - count)):
                count += 1
                path = f"{above}/{last}" if above else last
                try:
                    about = os.stat(last, dir_fd=fd, follow_symlinks=False)
                except FileNotFoundError:
                    continue  # deleted meanwhile
                if not stat.S_ISDIR(about.st_mode):
                    yield path, about
                elif level < depth:
                    todo.append((path, level + 1))


def append(base: Path | str, name: str, text: str) -> None:
    """Append text to a file, creating it if missing. Raises OSError, ValueError."""
    fd = open_file(base, name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(fd, text.encode())
    finally:
        _close(fd)


def open_log(base: Path | str, name: str) -> int:
    """Open a log for appending. A link, pipe or folder of that name is deleted first; if that fails, open /dev/null."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    with contextlib.suppress(OSError):
        return open_file(base, name, flags, 0o664)
    make_way(base, name)
    with contextlib.suppress(OSError):
        return open_file(base, name, flags, 0o664)
    return _open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def make_way(base: Path | str, name: str) -> None:
    """Free a name: delete the file or folder, or rename it if that fails (a folder's owner can prevent a deletion)."""
    if not remove(base, name):
        above, last = _split(name)
        with contextlib.suppress(OSError):
            rename(base, name, f"{above}/.{last}.{_random()}".lstrip("/"))


def replace(base: Path | str, name: str, content: bytes, mode: int = 0o644) -> None:
    """Write a file atomically, replacing any file, link or folder of that name. Raises OSError, ValueError."""
    above, last = _split(name)
    with folder(base, above) as at:
        beside = f".{last}.{_random()}"
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=at)
        try:
            with open(fd, "wb") as file:  # noqa: PTH123 - a descriptor
                file.write(content)
            try:
                os.rename(beside, last, src_dir_fd=at, dst_dir_fd=at)
            except IsADirectoryError:
                make_way(base, name)
                os.rename(beside, last, src_dir_fd=at, dst_dir_fd=at)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(beside, dir_fd=at)
            raise


def _random() -> str:
    return os.urandom(8).hex()


def rename(base: Path | str, name: str, to: str) -> None:
    """Move a file or folder of any kind to another name below the same base. Raises OSError, ValueError."""
    (above, last), (above_to, last_to) = _split(name), _split(to)
    with folder(base, above) as at, folder(base, above_to) as at_to:
        os.replace(last, last_to, src_dir_fd=at, dst_dir_fd=at_to)


def remove(base: Path | str, name: str) -> bool:
    """Delete a file, a link, or a folder with its content; return False if anything could not be deleted.

    If a tree is too deep for Python's recursion limit or the number of descriptors, rm(1) deletes the tree. Like this
    module, rm follows no links.
    """
    above, last = _split(name)
    try:
        at = open_folder(base, above)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        here = f"/proc/self/fd/{at}/{last}"
        with contextlib.suppress(OSError, RecursionError):
            _delete(at, last)
        if os.path.lexists(here):
            import subprocess  # the saver, which imports this module, starts in fewer milliseconds without

            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                rm = ["rm", "-rf", "--one-file-system", "--", here]
                subprocess.run(rm, pass_fds=(at,), stderr=subprocess.DEVNULL, timeout=_REMOVE_S, check=False)
        return not os.path.lexists(here)
    finally:
        _close(at)


def _delete(at: int, name: str) -> None:
    """Delete a name in an open folder. (``shutil.rmtree`` would open even a pipe, and then wait for a writer.)"""
    try:
        os.unlink(name, dir_fd=at)
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):  # the name is a folder (PermissionError: on macOS)
        fd = _open(name, _FOLDER, dir_fd=at)
        try:
            with os.scandir(fd) as entries:
                inside = [entry.name for entry in entries]
            for each in inside:
                with contextlib.suppress(OSError):
                    _delete(fd, each)
        finally:
            _close(fd)
        os.rmdir(name, dir_fd=at)


def _listed(fd: int, most: int) -> Iterator[str]:
    with os.scandir(fd) as entries:
        for _, entry in zip(range(most), entries, strict=False):
            yield entry.name


def _steps(name: str) -> list[str]:
    steps = name.split("/") if name else []
    if any(step in ("", ".", "..") or "\0" in step for step in steps):
        raise ValueError(f"{name!r} leads outside its folder")
    return steps


def _split(name: str) -> tuple[str, str]:
    steps = _steps(name)
    if not steps:
        raise ValueError("the name is empty")
    return "/".join(steps[:-1]), steps[-1]
