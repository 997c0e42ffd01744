"""Reads how busy this machine is: CPU, memory and the data disk. What cannot be read is None."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from spotkeeper.contract.usage import HostUsage

PROC = Path("/proc")
Ticks = tuple[int, int]  # of all CPUs since the boot: idle, all


def host_usage(mount: Path, before: Ticks | None, after: Ticks | None, proc: Path = PROC) -> HostUsage:
    """Return the machine's figures, without devices.

    Args:
        mount: where the data disk is mounted.
        before: the ticks from which on CPU use is measured.
        after: the ticks up to which it is measured.
    """
    memory = _memory(proc)
    whole, free = memory.get("MemTotal"), memory.get("MemAvailable")
    disk = disk_bytes(mount)
    return HostUsage(
        cpus=os.cpu_count() or 0,
        cpu=_busy(before, after),
        memory_bytes=whole,
        memory_used_bytes=None if whole is None or free is None else max(0, whole - free),
        disk_bytes=disk[0] if disk else None,
        disk_used_bytes=disk[1] if disk else None,
    )


def _busy(before: Ticks | None, after: Ticks | None) -> float | None:
    """Return the share of CPU time between two readings that was not idle, 0 to 1."""
    if before is None or after is None or after[1] <= before[1]:
        return None
    return min(1.0, max(0.0, 1.0 - (after[0] - before[0]) / (after[1] - before[1])))


def cpu_ticks(proc: Path = PROC) -> Ticks | None:
    """Return idle and all ticks since the boot. Waiting for a disk counts as idle, steal time as busy."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        words = (proc / "stat").read_text().split("\n", 1)[0].split()
        numbers = [int(word) for word in words[1:9]]
        return numbers[3] + numbers[4], sum(numbers)
    return None


def _memory(proc: Path) -> dict[str, int]:
    """Return the machine's memory in bytes, by the kernel's names."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / "meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in ("MemTotal", "MemAvailable"):
                found[name] = int(rest.split()[0]) * 1024
    return found


def disk_bytes(mount: Path) -> tuple[int, int] | None:
    """Return size and use of the data disk; None if none is mounted there."""
    with contextlib.suppress(OSError):
        if os.path.ismount(mount):
            found = os.statvfs(mount)
            return found.f_blocks * found.f_frsize, (found.f_blocks - found.f_bfree) * found.f_frsize
    return None
