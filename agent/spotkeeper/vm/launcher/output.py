"""What a worker prints goes through a pipe into its log file, which is kept short while it is written.

The files lie in memory (``/run``), with what job and agent must write to go on; a loop that prints a gigabyte a
second fills it between any two looks of anybody. A small process per worker reads the pipe, the child of one that
replaces it where it is killed: that belongs to the launcher, which lets it come to the end of the pipe before it is
ended. Standard library only; Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import stat
import sys
from pathlib import Path

KEPT_BYTES = 64 << 20  # of each file, from its end; at times twice as much
NAME = "sk-output"  # of the process, as /proc/<pid>/comm shows it
_PIECE = 64 << 10  # what a pipe holds
_PR_SET_NAME = 15
_PUNCH_HOLE = 0x03  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE


def keep_end(fd: int, size: int, kept: int) -> None:
    """Give back what all but the last ``kept`` bytes of a file take. Nobody notices: its size stays as it is."""
    ctypes.CDLL(None).fallocate(fd, _PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(max(0, size - kept)))


def tail(path: Path, size: int) -> bytes:
    """The last ``size`` bytes of a log, without the line that they cut; nothing where it cannot be read."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - size)
        file.seek(start)
        read = file.read(size)
        return read if start == 0 else read.partition(b"\n")[2] or read
    return b""


def bound() -> None:
    """Put a pipe between this process and the files that its standard output and error are, if they are.

    Where that cannot be had they stay what they are: no job fails for its log's sake.
    """
    files = [fd for fd in (1, 2) if stat.S_ISREG(os.fstat(fd).st_mode)]
    if not files:
        return
    pipes = {fd: os.pipe() for fd in files}
    if _start([(read, fd) for fd, (read, _) in pipes.items()]):
        for fd, (_, write) in pipes.items():
            os.dup2(write, fd)
    for ends in pipes.values():
        for end in ends:
            os.close(end)


def _start(pairs: list[tuple[int, int]]) -> bool:
    """A new interpreter: 10 ms where a fork of this process, which has torch, takes 30, twice, and ends as slowly."""
    for read, _ in pairs:
        os.set_inheritable(read, True)
    words = [str(KEPT_BYTES), *(f"{read}:{fd}" for read, fd in pairs)]
    try:
        child = os.posix_spawn(sys.executable, [sys.executable, "-BIS", __file__, *words], os.environ)
    except OSError:
        return False
    return os.waitpid(child, 0)[1] == 0


def is_carrier(pid: int) -> bool:
    """Whether a process carries a worker's output: it ends by itself, soon after the last that writes."""
    try:
        with open(f"/proc/{pid}/comm") as file:  # noqa: PTH123 - asked often
            return file.read().strip() == NAME
    except OSError:
        return False


def main(words: list[str]) -> None:
    """``KEPT_BYTES READ:FILE...``, descriptors all. Returns at once; what it leaves is the launcher's child, for the
    user's code may wait for all of its own."""
    kept = int(words[0])
    files = {int(read): int(fd) for read, _, fd in (word.partition(":") for word in words[1:])}
    ctypes.CDLL(None).prctl(_PR_SET_NAME, NAME.encode(), 0, 0, 0)
    if os.fork() == 0:
        _keep_carrying(files, kept)


def _keep_carrying(files: dict[int, int], kept: int) -> None:
    """Have it done by a child, and by another where somebody kills that. Never returns.

    Without a reader whoever prints next would get EPIPE, and the job end for its log's sake; this process, which
    only waits, keeps the pipe readable meanwhile. What the killed one held, 64 KB at most, is lost.
    """
    try:
        _close_all_but({*files, *files.values()})
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # meant for those who print
        while True:
            child = os.fork()
            if child == 0:
                _carry(files, kept)
            if not os.WIFSIGNALED(os.waitpid(child, 0)[1]):
                break
    finally:
        os._exit(0)


def _carry(files: dict[int, int], kept: int) -> None:
    """Until nobody can write any more. Never returns."""
    try:
        sizes = {fd: os.lseek(fd, 0, os.SEEK_END) for fd in files.values()}
        holes = dict(sizes)  # up to where a file was looked at
        while files:
            for read in select.select(list(files), [], [])[0]:
                fd = files[read]
                piece = os.read(read, _PIECE)
                if not piece:
                    del files[read]
                    continue
                with contextlib.suppress(OSError):  # a full disk: what is printed is lost, and the job goes on
                    sizes[fd] += os.write(fd, piece)
                if sizes[fd] - holes[fd] >= kept:
                    holes[fd] = sizes[fd]
                    keep_end(fd, sizes[fd], kept)
    finally:
        os._exit(0)


def _close_all_but(keep: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - no Path per descriptor
        if int(name) not in keep:
            with contextlib.suppress(OSError):  # that of the listing
                os.close(int(name))


if __name__ == "__main__":
    main(sys.argv[1:])
