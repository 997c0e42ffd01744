"""Collects Python stack traces of a job's processes from outside, whatever call they are stuck in.

Each worker registers a signal (``listen``, from ``boot.py``) that makes it write its stack traces. faulthandler's
handler runs in C and takes no lock, so it also shows a call into C that never returns. Processes that a worker forks,
such as a DataLoader's workers, inherit the handler. Run as a program, this file signals one process after the other and
writes two files into the run folder:

    stacks.log    for people
    stacks.json   a summary, written last: each worker's place, and whether it waits for its peers

    python -BIS stacks.py PID-OF-TORCHRUN FOLDER

A process without the handler is skipped, because the signal would end it. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import platform
import re
import signal
import sys
import sysconfig
import time
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path

SIGNAL = signal.SIGRTMIN + 9  # USR1 and USR2 are left to the user's code
TEXT, SHORT = "stacks.log", "stacks.json"
ANSWER_S = 1.0  # time for a process to begin its answer
AGAIN_S = 0.5  # pause until a worker that does not wait for its peers is asked again
WORKS_SHARE = 0.2  # share of a core in that pause above which it works
QUIET_S = 0.03  # an answer is complete after this time without another byte
LONGEST_S = 3.0  # longest answer: a hundred threads on a busy machine
MOST = 64  # processes to ask: a machine has 8 workers with some loaders each
_TGKILL = {"x86_64": 234, "aarch64": 131}
_BOOT = "/spotkeeper_agent/launcher/boot.py"
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


class Where(str, Enum):
    """A worker's state, by the innermost calls of its main thread.

    WAITS: the worker waits for its peers, in a collective or a replicated model's backward pass; DEVICE: it waits for
    its device, where a collective may hang; ELSEWHERE: it is in other code, so its peers wait for it; WORKS: like
    ELSEWHERE, but it makes progress or uses the processor; SILENT: it does not even run a signal handler; GONE: it has
    ended.
    """

    WAITS = "waits"
    DEVICE = "device"
    ELSEWHERE = "elsewhere"
    WORKS = "works"
    SILENT = "silent"
    GONE = "gone"


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line} in {self.function}"


@dataclass(frozen=True)
class WorkerPlace:
    """One worker's state. ``at``: its innermost call (:func:`at`); ``state``: the kernel's process state."""

    local_rank: int
    pid: int
    where: Where
    at: str
    state: str


# -- in each worker


def listen(run: Path, local_rank: int) -> None:
    """Make this process, and those it forks, write their stack traces on ``SIGNAL``, if possible."""
    with contextlib.suppress(OSError, AttributeError):
        (run / f"pid.{local_rank}").write_text(f"{os.getpid()}\n")
        file = (run / f"stacks.{local_rank}").open("ab", buffering=0)  # faulthandler keeps it
        faulthandler.register(SIGNAL, file, all_threads=True, chain=False)


# -- as a program


def main(torchrun: int, run: Path) -> None:
    """Collect the stack traces of all descendants of torchrun, workers first, and write both files."""
    workers = {pid: rank for rank, pid in workers_of(run).items()}
    places, texts = [], [f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}: stack traces, each thread's innermost call first"]
    tree = descendants(torchrun)
    for pid, rank in workers.items():
        answer = ask(pid, run / f"stacks.{rank}") if pid in tree else ""
        place = _place(pid, rank, answer, there=pid in tree)
        if place.where is Where.ELSEWHERE and works(pid, run / f"stacks.{rank}", answer):
            place = replace(place, where=Where.WORKS)
        places.append(place)
        texts.append(f"local rank {rank} (pid {pid}): {in_words(place)}\n{users_part(answer)}")
    for pid in [pid for pid in tree if pid not in workers][: MOST - len(workers)]:
        rank_of = next((workers[each] for each in above(pid, tree) if each in workers), None)
        if rank_of is not None and (answer := ask(pid, run / f"stacks.{rank_of}")):
            texts.append(f"local rank {rank_of}, its process {pid} ({_name(pid)}):\n{users_part(answer)}")
    with (run / TEXT).open("a") as file:
        file.write("\n".join(texts) + "\n")
    temporary = run / (SHORT + ".tmp")
    temporary.write_text(json.dumps([asdict(place) for place in places]))
    temporary.replace(run / SHORT)


def workers_of(run: Path) -> dict[int, int]:
    """Return the pids of this machine's workers by local rank, as the workers wrote them."""
    found = {}
    for path in run.glob("pid.*"):
        with contextlib.suppress(OSError, ValueError):
            found[int(path.suffix[1:])] = int(path.read_text())
    return dict(sorted(found.items()))


def in_words(place: WorkerPlace) -> str:
    """Describe a worker's state in words, such as ``does not wait for its peers, in train.py:41 in load``."""
    words = {
        Where.WAITS: "waits for its peers",
        Where.DEVICE: "waits for its device",
        Where.ELSEWHERE: "does not wait for its peers",
        Where.WORKS: "works",
        Where.SILENT: "does not answer",
        Where.GONE: "has ended",
    }
    at = f", in {place.at}" if place.at else ""
    return f"{words[place.where]}{at}" + (f" ({place.state})" if place.state else "")


def ask(pid: int, file: Path) -> str:
    """Return one process's stack traces; "" if it has no handler or does not answer."""
    if not _listens(pid):
        return ""
    before = _size(file)
    for send in (os.kill, _signal_a_thread):
        with contextlib.suppress(OSError):
            send(pid, SIGNAL)
        if _await(file, before):
            with contextlib.suppress(OSError), file.open("rb") as stacks:
                stacks.seek(before)
                return stacks.read().decode("utf-8", "replace")
    return ""


def works(pid: int, file: Path, answer: str) -> bool:
    """Whether the process is only slow: a moment later it is at another call or has used the processor."""
    began, used = time.monotonic(), processor_s(pid)
    time.sleep(AGAIN_S)
    if processor_s(pid) - used > WORKS_SHARE * (time.monotonic() - began):
        return True
    again = ask(pid, file)
    return bool(again) and main_frames(again) != main_frames(answer)


def _await(file: Path, before: int) -> bool:
    began = changed = time.monotonic()
    size = before
    while True:
        time.sleep(0.005)
        now, new = time.monotonic(), _size(file)
        if new != size:
            size, changed = new, now
        if size > before and (now - changed > QUIET_S or now - began > LONGEST_S):
            return True
        if size == before and now - began > ANSWER_S:
            return False


def _signal_a_thread(pid: int, number: int) -> None:
    """Signal a thread that is not the main thread, as the main thread may hang in a disk call that ignores signals."""
    tgkill = _TGKILL.get(platform.machine())
    others = [int(name) for name in os.listdir(f"/proc/{pid}/task") if int(name) != pid]  # noqa: PTH208
    if tgkill is not None and others:
        ctypes.CDLL(None).syscall(ctypes.c_long(tgkill), pid, others[0], number)


def _listens(pid: int) -> bool:
    """Whether the process has a handler for ``SIGNAL``; without one, the signal would end the process."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (SIGNAL - 1) & 1)
    return False


def _place(pid: int, rank: int, answer: str, *, there: bool) -> WorkerPlace:
    if not there:
        return WorkerPlace(rank, pid, Where.GONE, "", "")
    frames = main_frames(answer)
    return WorkerPlace(rank, pid, where(frames) if answer else Where.SILENT, at(frames), _state(pid))


def main_frames(answer: str) -> list[Frame]:
    """Return the main thread's frames, innermost first; faulthandler writes the oldest thread last."""
    found: list[Frame] = []
    for line in answer.splitlines():
        if line.startswith(("Thread 0x", "Current thread 0x")):
            found = [] if "C stack" not in line else found  # 3.14 shows the current thread's C stack as well
        elif (frame := _FRAME.match(line)) is not None:
            found.append(Frame(frame[1], int(frame[2]), frame[3]))
    return found


def users_part(answer: str) -> str:
    """Return stack traces without the thirty lines of launcher and torchrun that led to the user's script."""
    out, skips = [], False
    for line in answer.splitlines():
        frame = _FRAME.match(line)
        skips = frame is not None and (skips or frame[1].endswith(_BOOT))
        if not skips:
            out.append(line)
    return "\n".join(out) + "\n" if out else ""


# Frames between a collective and its caller that carry no information.
_THROUGH = ("/torch/_ops.py", "/torch/utils/_contextlib.py", "/torch/_compile.py")
_GANG = ("/torch/distributed/", "/torch/nn/parallel/distributed.py", "/spotkeeper/train/core/gang.py")
_ASKS_DEVICE = re.compile(r"\.(item|tolist|cpu|numpy|synchronize)\(|\.to\(")
_AWAITS = re.compile(r"\.wait\(\)")


def where(frames: list[Frame]) -> Where:
    """Return the state that these frames (innermost first) show."""
    inner = next((frame for frame in frames if not frame.file.endswith(_THROUGH)), None)
    if inner is None:
        return Where.ELSEWHERE
    if any(part in inner.file for part in _GANG) or inner.function == "_engine_run_backward":
        return Where.WAITS
    line = _source(inner)
    if (
        _AWAITS.search(line) and "threading" not in inner.file
    ):  # waiting for a collective: a method in C, so it has no frame
        return Where.WAITS
    device = _ASKS_DEVICE.search(line) or ("/torch/cuda/" in inner.file and inner.function == "synchronize")
    return Where.DEVICE if device else Where.ELSEWHERE


def at(frames: list[Frame]) -> str:
    """Return the innermost call, such as ``train.py:41 in load``.

    If that call is not in the user's code, add the user's call that led to it.
    """
    if not frames:
        return ""
    own = next((frame for frame in frames if _is_users(frame.file)), None)
    inner = frames[0]
    return str(inner) if own is None or own is inner else f"{inner}, called from {own}"


def _is_users(file: str) -> bool:
    ours = ("/site-packages/", "/dist-packages/", "/spotkeeper/", "/spotkeeper_agent/", "<")
    return not any(part in file for part in ours) and not file.startswith(sysconfig.get_path("stdlib"))


def _source(frame: Frame) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError), Path(frame.file).open() as file:
        for number, line in enumerate(file, 1):
            if number == frame.line:
                return line
    return ""


# -- processes


def descendants(root: int) -> dict[int, int]:
    """Return the pid of each descendant of ``root`` with its parent's pid, in the order of pids."""
    parents = {pid: parent for pid in _pids() if (parent := _parent(pid)) is not None}
    return {pid: parent for pid, parent in sorted(parents.items()) if root in above(pid, parents)}


def above(pid: int, parents: dict[int, int]) -> list[int]:
    """Return a process's parent, grandparent, and so on."""
    out: list[int] = []
    while (parent := parents.get(pid)) is not None and parent not in out:
        out.append(parent)
        pid = parent
    return out


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]  # noqa: PTH208 - no Path per process


def stat_of(pid: int) -> list[str]:
    """Return the fields of ``/proc/<pid>/stat`` after the name, which may be any text; [] if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def processor_s(pid: int) -> float:
    """Return the processor seconds of a process and its ended children."""
    fields = stat_of(pid)
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _parent(pid: int) -> int | None:
    fields = stat_of(pid)
    return int(fields[1]) if len(fields) > 1 else None


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    return "gone"


_STATES = {"R": "running", "S": "sleeping", "D": "in an uninterruptible system call", "T": "stopped"}


def _state(pid: int) -> str:
    fields = stat_of(pid)
    return _STATES.get(fields[0], fields[0]) if fields else ""


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
