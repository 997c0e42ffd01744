"""Reads from a generation's run folder how its workers ended: exit codes, first failure, signs of broken hardware.

The job can write anything into that folder, so invalid content counts as missing.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Struct

from spotkeeper.contract import codec
from spotkeeper.contract.facts import Failure, Sign
from spotkeeper.train.core import beneath
from spotkeeper_agent.launcher.torchrun import NAME

NOTE_BYTES = 64 << 10
MOST_RANKS = 10_000  # local ranks per machine, as in ``Failure``
END_BYTES = 64 * 1024  # bytes read from the end of each log
KERNEL_LINES = 20_000
EARLY_S = 5.0
KMSG = Path("dev/kmsg")

# The first pattern that matches is reported.
_LOGS = (
    (Sign.MEMORY, r"uncorrectable ECC error|uncorrectable NVLink error|CUDA_ERROR_ECC_UNCORRECTABLE"),
    (Sign.LOST, r"GPU has fallen off the bus|GPU is lost|no CUDA-capable device is detected|CUDA_ERROR_NO_DEVICE"),
    (Sign.FAULT, r"CUDA error: (?:an illegal instruction was encountered|hardware stack error|misaligned address)"),
    (Sign.NETWORK, r"NCCL WARN|ncclSystemError|ncclUnhandledCudaError|unhandled (?:system|cuda) error"),
)
# Xid numbers that indicate hardware (NVIDIA, "Xid Errors"): 48 double-bit ECC, 63 and 64 row remapping,
# 74 NVLink, 79 fallen off the bus, 92 high single-bit rate, 94 and 95 contained and uncontained ECC,
# 119 and 120 GSP, 140 unrecovered ECC. 13, 31 and 43 are left out: a script's own errors cause them.
_XIDS = {"48": Sign.MEMORY, "63": Sign.MEMORY, "64": Sign.MEMORY, "92": Sign.MEMORY, "94": Sign.MEMORY} | {
    "95": Sign.MEMORY, "140": Sign.MEMORY, "79": Sign.LOST, "74": Sign.DRIVER, "119": Sign.DRIVER, "120": Sign.DRIVER
}  # fmt: skip
_XID = re.compile(r"NVRM: Xid \([^)]*\): (\d+)")
_KERNEL = re.compile(r"Machine check events logged|mce: \[Hardware Error\]|I/O error, dev (?!loop|sr)")


class _Note(Struct, frozen=True):
    at: Annotated[float, msgspec.Meta(ge=0.0, lt=1e11)]  # unix seconds, in the range that a fact can hold
    what: str = ""
    follows: bool = False


def failures(folder: Path) -> dict[int, Failure]:
    """Return each worker's failure, by local rank."""
    found = {}
    for local_rank, text in _noted(folder, NAME).items():
        with contextlib.suppress(msgspec.DecodeError):
            note = codec.decode(text, _Note)
            found[local_rank] = Failure(note.follows, int(note.at * 1000), local_rank)
    return found


def first(folder: Path) -> Failure | None:
    """Return the earliest failure that no peer caused; if peers caused all failures, the earliest one."""
    return min(failures(folder).values(), key=Failure.order, default=None)


def exit_codes(folder: Path) -> list[int]:
    """Return the exit codes that workers wrote at their end (``exit.<local rank>``)."""
    return [code & 0xFF for code in _numbers(folder, "exit").values()]  # as exit(3) does: a job may write anything


def worker_pids(folder: Path) -> set[int]:
    """Return the pids of this machine's workers, as the workers wrote them to files (``launcher/stacks.py``)."""
    return {pid for pid in _numbers(folder, "pid").values() if pid > 0}


def _numbers(folder: Path, kind: str) -> dict[int, int]:
    found = {}
    for local_rank, text in _noted(folder, kind).items():
        with contextlib.suppress(ValueError):
            found[local_rank] = int(text)
    return found


def _noted(folder: Path, kind: str) -> dict[int, bytes]:
    """Return the contents of the files ``<kind>.<local rank>`` by local rank. The job may have replaced the files."""
    found = {}
    with contextlib.suppress(OSError):
        for name in beneath.names(folder):
            head, _, rank = name.partition(".")
            if head == kind and rank.isdecimal() and len(rank) <= len(str(MOST_RANKS)) and int(rank) < MOST_RANKS:
                with contextlib.suppress(OSError):
                    found[int(rank)] = beneath.read(folder, name, NOTE_BYTES)
    return found


def printed(folder: Path) -> list[str]:
    """Return the names of a run folder's logs: torchrun's own log, and the workers' logs below ``logs``."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        found += sorted(name for name in beneath.names(folder) if name.endswith(".log"))
        walked = beneath.walk(folder, "logs", depth=4)
        found += sorted(name for name, _ in walked if Path(name).name in ("stdout.log", "stderr.log"))
    return found


def tail(folder: Path, name: str, most: int) -> bytes:
    """Return the whole lines in the last ``most`` bytes of a log; b"" if the log cannot be read."""
    with contextlib.suppress(OSError):
        text, start = beneath.tail(folder, name, most)
        return text if start == 0 else text.partition(b"\n")[2] or text
    return b""


def of_crash(folder: Path, root: Path) -> Sign | None:
    """Return the sign of broken hardware that a crashed generation left on this machine, if any.

    The function decides what follows: it compares machines and counts signs. Errors that a script can cause on any
    machine (out of memory, an illegal address, a device-side assert) are no signs.

    Args:
        folder: the generation's run folder.
        root: the folder that holds the machine's ``/dev``.
    """
    try:
        began = beneath.status(folder, "logs").st_mtime  # made at the start; torchrun adds folders soon after
    except OSError:
        return None
    since_s = time.clock_gettime(time.CLOCK_MONOTONIC) - max(0.0, time.time() - began) - EARLY_S
    return in_kernel(kernel_lines(root / KMSG, since_s)) or in_logs(folder)


def in_logs(folder: Path) -> Sign | None:
    """Return a sign of broken hardware in the last output of workers and torchrun, if any."""
    text = "".join(tail(folder, name, END_BYTES).decode(errors="replace") for name in printed(folder))
    return next((found for found, pattern in _LOGS if re.search(pattern, text)), None)


def in_kernel(lines: list[str]) -> Sign | None:
    """Return a sign of broken hardware in the kernel's messages: NVIDIA's Xid errors, machine checks, disk errors."""
    found = {_XIDS.get(match[1]) for line in lines if (match := _XID.search(line))}
    if any(_KERNEL.search(line) for line in lines):
        found.add(Sign.HOST)
    return next((each for each in Sign if each in found), None)


def kernel_lines(kmsg: Path, since_s: float) -> list[str]:
    """Return the kernel log's messages since ``since_s`` (seconds since boot); [] if that log cannot be read.

    Each read returns a record ``prio,seq,microseconds,flags;text`` (Linux, Documentation/ABI/testing/dev-kmsg).
    """
    try:
        fd = os.open(kmsg, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    out: list[str] = []
    try:
        for _ in range(KERNEL_LINES):
            record = os.read(fd, 8192)
            if not record:
                break
            out += [text for line in record.decode(errors="replace").splitlines() if (text := _since(line, since_s))]
    except OSError:  # EAGAIN: no newer record; EPIPE: overwritten during the read
        pass
    finally:
        os.close(fd)
    return out


def _since(line: str, since_s: float) -> str:
    head, _, text = line.partition(";")
    fields = head.split(",")
    if len(fields) < 3 or not fields[2].isdecimal() or int(fields[2]) / 1e6 < since_s:
        return ""
    return text
