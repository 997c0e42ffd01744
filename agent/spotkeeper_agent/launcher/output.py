"""Pipes a worker's output into the node's complete log, and into its log file, which is kept short while it grows.

The log files lie in memory (``/run``), beside files that job and agent must be able to write; the complete log goes to
the spool on the boot disk (``spool.py``). A loop that prints a gigabyte a second would fill both before any periodic
check. A small process per worker, the *output worker*, reads the pipe; if it is killed or fails, its parent starts
another one.
Before the launcher ends these processes, it lets them read the pipe to its end. Standard library only; Linux only.
"""

from __future__ import annotations

import sys

if not __package__:  # run as a file, as in ``host.py``
    sys.path[:0] = [__file__.rsplit("/", 3)[0]]

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import stat
from collections import deque
from pathlib import Path

from spotkeeper_agent.launcher.spool import Spool

KEPT_BYTES = 4 << 20  # kept at the end of each file; until the next cut, up to twice as much
NAME = "sk-output"  # the process's name in /proc/<pid>/comm
_PIPE = 1 << 20  # a pipe's size: what a worker can print before it waits for its output worker
_PIPES = 32 << 20  # the size of all; beyond 64 MB Linux makes all other pipes of the user small
_PIECE = 64 << 10
_HELD_BYTES = 4 << 20  # of memory: what was read and is not written yet
_FAILURES = 3  # of output workers; afterwards their parent copies, without the spool
_PR_SET_NAME = 15
_PUNCH_HOLE = 0x03  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE


def keep_end(fd: int, size: int, kept: int) -> None:
    """Free the space of all but the last ``kept`` bytes of a file without changing its size, which writers rely on."""
    ctypes.CDLL(None).fallocate(fd, _PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(max(0, size - kept)))


def tail(path: Path, size: int) -> bytes:
    """Return the whole lines in the last ``size`` bytes of a log; b"" if the log cannot be read."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - size)
        file.seek(start)
        read = file.read(size)
        return read if start == 0 else read.partition(b"\n")[2] or read
    return b""


def bound() -> None:
    """Redirect standard output and error through pipes, if they are files.

    If no output worker can be started, nothing is redirected: a log problem never fails a job.
    """
    files = [fd for fd in (1, 2) if stat.S_ISREG(os.fstat(fd).st_mode)]
    if not files:
        return
    pipes = {fd: os.pipe() for fd in files}
    length = min(_PIPE, _PIPES // (2 * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    for _, write in pipes.values():
        with contextlib.suppress(OSError):  # refused, it stays at 64 KB
            fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, length)
    if _start([(read, fd) for fd, (read, _) in pipes.items()]):
        for fd, (_, write) in pipes.items():
            os.dup2(write, fd)
    for ends in pipes.values():
        for end in ends:
            os.close(end)


def _start(pairs: list[tuple[int, int]]) -> bool:
    """Start the output worker in a new interpreter. That takes 10 ms; two forks of a process with torch take 60 ms."""
    for read, _ in pairs:
        os.set_inheritable(read, True)
    words = [str(KEPT_BYTES), *(f"{read}:{fd}:{'oe'[fd - 1]}" for read, fd in pairs)]
    try:
        child = os.posix_spawn(sys.executable, [sys.executable, "-BIS", __file__, *words], os.environ)
    except OSError:
        return False
    return os.waitpid(child, 0)[1] == 0


def is_output_worker(pid: int) -> bool:
    """Whether a process is an output worker, which ends by itself once no process can write to its pipe."""
    try:
        with open(f"/proc/{pid}/comm") as file:  # noqa: PTH123 - asked often
            return file.read().strip() == NAME
    except OSError:
        return False


def main(words: list[str]) -> None:
    """Start the output worker. Arguments: ``KEPT_BYTES READ:FILE:STREAM...``, where READ and FILE are descriptors.

    Returns at once, so the output worker becomes the launcher's child, and user code never waits for its end."""
    kept = int(words[0])
    streams = [word.split(":") for word in words[1:]]
    files = {int(read): (int(fd), stream.encode()) for read, fd, stream in streams}
    ctypes.CDLL(None).prctl(_PR_SET_NAME, NAME.encode(), 0, 0, 0)
    if os.fork() == 0:
        _supervise(files, kept)


def _supervise(files: dict[int, tuple[int, bytes]], kept: int) -> None:
    """Have a child process copy the pipes; if the child is killed or fails, start another. Never returns.

    ``files``: the log file and the stream of each pipe. Between two children this process keeps the pipes open: a print
    into a pipe without a reader would crash the job. A killed child loses what it had read but not written: up to 4 MB
    of the file in a flood, and a second of the complete log, which says so.

    After ``_FAILURES`` children have failed, or if no child can be started (a job may use up its processes), this
    process copies the pipes itself: to the log files only, and if that fails too, nowhere.
    """
    try:
        _close_all_but({*files, *(fd for fd, _ in files.values())})
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # these signals are meant for the workers
        failures, before = 0, ""
        while failures < _FAILURES:
            try:
                child = os.fork()
            except OSError:
                break
            if child == 0:
                _work(files, kept, before)
            status = os.waitpid(child, 0)[1]
            if status == 0:
                return
            killed = os.WIFSIGNALED(status)
            failures += not killed
            before = "was killed" if killed else "failed"
        with contextlib.suppress(Exception):
            _copy(dict(files), kept, None)
            return
        _discard(files)
    finally:
        os._exit(0)


def _work(files: dict[int, tuple[int, bytes]], kept: int, before: str) -> None:
    """Be the output worker: exit with 0 once all writers have closed the pipes, with 1 after an exception."""
    try:
        _copy(files, kept, Spool.of(os.environ, before=before))
        os._exit(0)
    finally:
        os._exit(1)


def _copy(files: dict[int, tuple[int, bytes]], kept: int, spool: Spool | None) -> None:
    """Copy each pipe to its log file and to the spool until all writers have closed the pipes.

    Reads before it writes, up to ``_HELD_BYTES``: a worker that prints more than its pipe takes waits for the reads
    only. The piece of memory that was used last is used next, since the processor's cache has it.
    """
    sizes = {fd: os.lseek(fd, 0, os.SEEK_END) for fd, _ in files.values()}
    holes = dict(sizes)  # each file's size when its space was last freed
    memory = memoryview(bytearray(_HELD_BYTES))
    free = [memory[at : at + _PIECE] for at in range(0, _HELD_BYTES, _PIECE)]
    held: deque[tuple[int, bytes, memoryview, int]] = deque()  # file, stream, memory, and how many bytes of it
    while files or held:
        wait_s = 0 if held else spool.wait_s() if spool else None
        ready = select.select(list(files) if free else [], [], [], wait_s)[0]
        for read in ready[: len(free)]:
            if count := os.readv(read, [free[-1]]):
                held.append((*files[read], free.pop(), count))
            else:
                del files[read]
        if ready:
            continue
        if held:
            fd, stream, piece, count = held.popleft()
            with contextlib.suppress(OSError):  # with a full disk output is lost, but the job continues
                sizes[fd] += os.write(fd, piece[:count])
            if sizes[fd] - holes[fd] >= kept:
                holes[fd] = sizes[fd]
                keep_end(fd, sizes[fd], kept)
            if spool is not None:
                spool.add(stream, bytes(piece[:count]))
            free.append(piece)
        if spool is not None:
            spool.tick()
    if spool is not None:
        spool.end()


def _discard(files: dict[int, tuple[int, bytes]]) -> None:
    while files:
        for read in select.select(list(files), [], [])[0]:
            if not os.read(read, _PIECE):
                del files[read]


def _close_all_but(keep: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - no Path per descriptor
        if int(name) not in keep:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                os.close(int(name))


if __name__ == "__main__":
    main(sys.argv[1:])
