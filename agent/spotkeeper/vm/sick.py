"""Whether a crash looks like broken hardware: the ends of its logs, and what the kernel said meanwhile.

Only looked for once a generation has crashed; what cannot be read says nothing. A sign blames
nobody by itself: reconcile compares the machines, and counts. Errors that a script brings
about on any machine (out of memory, an illegal address, a device-side assert) are no signs.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from spotkeeper.spec.sick import Sign
from spotkeeper.vm.launcher.output import tail

END_BYTES = 64 * 1024  # of each log
KERNEL_LINES = 20_000
EARLY_S = 5.0
KMSG = Path("dev/kmsg")

# In this order: the first that is found is the one that is told.
_LOGS = (
    (Sign.MEMORY, r"uncorrectable ECC error|uncorrectable NVLink error|CUDA_ERROR_ECC_UNCORRECTABLE"),
    (Sign.LOST, r"GPU has fallen off the bus|GPU is lost|no CUDA-capable device is detected|CUDA_ERROR_NO_DEVICE"),
    (Sign.FAULT, r"CUDA error: (?:an illegal instruction was encountered|hardware stack error|misaligned address)"),
    (Sign.NETWORK, r"NCCL WARN|ncclSystemError|ncclUnhandledCudaError|unhandled (?:system|cuda) error"),
)
# Xid numbers that speak of the hardware (NVIDIA, "Xid Errors"): 48 double-bit ECC, 63 and 64 row remapping,
# 74 NVLink, 79 fallen off the bus, 92 high single-bit rate, 94 and 95 contained and uncontained ECC,
# 119 and 120 GSP, 140 unrecovered ECC. Not 13, 31 and 43, which a script's own errors bring about.
_XIDS = {"48": Sign.MEMORY, "63": Sign.MEMORY, "64": Sign.MEMORY, "92": Sign.MEMORY, "94": Sign.MEMORY} | {
    "95": Sign.MEMORY, "140": Sign.MEMORY, "79": Sign.LOST, "74": Sign.DRIVER, "119": Sign.DRIVER, "120": Sign.DRIVER
}  # fmt: skip
_XID = re.compile(r"NVRM: Xid \([^)]*\): (\d+)")
_KERNEL = re.compile(r"Machine check events logged|mce: \[Hardware Error\]|I/O error, dev (?!loop|sr)")


def of_crash(folder: Path, root: Path) -> Sign | None:
    """The sign of broken hardware that a crashed generation left on this machine, if any.

    Args:
        folder: the generation's run folder.
        root: where the machine's ``/dev`` is.
    """
    try:
        began = (folder / "logs").stat().st_mtime  # made when it was started; torchrun's folders in it soon after
    except OSError:
        return None
    since_s = time.clock_gettime(time.CLOCK_MONOTONIC) - max(0.0, time.time() - began) - EARLY_S
    return in_kernel(kernel_lines(root / KMSG, since_s)) or in_logs(folder)


def in_logs(folder: Path) -> Sign | None:
    """By the ends of what the workers and torchrun printed."""
    logs = sorted((*folder.glob("*.log"), *(folder / "logs").rglob("std*.log")))
    # Files only: the folder is the job's, and whoever opens a pipe waits for its other end.
    text = "".join(tail(path, END_BYTES).decode(errors="replace") for path in logs if path.is_file())
    return next((found for found, pattern in _LOGS if re.search(pattern, text)), None)


def in_kernel(lines: list[str]) -> Sign | None:
    """By kernel messages: Xid lines of NVIDIA's driver, machine checks, disk errors."""
    found = {_XIDS.get(match[1]) for line in lines if (match := _XID.search(line))}
    if any(_KERNEL.search(line) for line in lines):
        found.add(Sign.HOST)
    return next((each for each in Sign if each in found), None)


def kernel_lines(kmsg: Path, since_s: float) -> list[str]:
    """Messages of the kernel's ring since ``since_s`` (seconds since boot); none where it cannot be read.

    Records are ``prio,seq,microseconds,flags;text``, one a read (Documentation/ABI/testing/dev-kmsg).
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
    except OSError:  # EAGAIN: that was the newest; EPIPE: overwritten while we read
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
