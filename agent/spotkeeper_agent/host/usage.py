"""Reads how busy this machine is, prints it as JSON, and ends: CPU, memory, the data disk, and NVIDIA devices by NVML.

The agent runs this file once a minute as a process of its own, so that NVML's library, which takes 20 MB and may hang
with its driver, is never in the agent. It imports only the standard library. A figure that cannot be read is null.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

SAMPLE_S = 1.0  # real; CPU use is measured over so long
MOST_DEVICES = 64
LIBRARY = "libnvidia-ml.so.1"
UNCORRECTED, VOLATILE = 1, 0  # NVML's kinds of ECC errors: not corrected, since the driver was loaded
CORE_TEMPERATURE = 0


def main(argv: list[str]) -> int:
    """Print one document. ``argv``: the folder where the data disk is mounted."""
    print(json.dumps(host(Path(argv[0])) | {"devices": devices()}))
    return 0


def host(mount: Path, proc: Path = Path("/proc"), sample_s: float = SAMPLE_S) -> dict[str, Any]:
    memory = _memory(proc)
    disk = _disk(mount)
    return {
        "cpus": os.cpu_count() or 0,
        "cpu": _cpu(proc, sample_s),
        "memory_bytes": memory.get("MemTotal"),
        "memory_used_bytes": _difference(memory.get("MemTotal"), memory.get("MemAvailable")),
        "disk_bytes": disk[0] if disk else None,
        "disk_used_bytes": disk[1] if disk else None,
    }


def _difference(whole: int | None, part: int | None) -> int | None:
    return None if whole is None or part is None else max(0, whole - part)


def _cpu(proc: Path, sample_s: float) -> float | None:
    """Return the share of CPU time that was not idle during a sample, 0 to 1."""
    before = _ticks(proc)
    time.sleep(sample_s)
    after = _ticks(proc)
    if before is None or after is None or after[1] <= before[1]:
        return None
    return min(1.0, max(0.0, 1.0 - (after[0] - before[0]) / (after[1] - before[1])))


def _ticks(proc: Path) -> tuple[int, int] | None:
    """Return idle and all ticks since the boot. Waiting for a disk counts as idle, a hypervisor's theft as busy."""
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


def _disk(mount: Path) -> tuple[int, int] | None:
    """Return size and use of the data disk; None if none is mounted there."""
    with contextlib.suppress(OSError):
        if os.path.ismount(mount):
            found = os.statvfs(mount)
            return found.f_blocks * found.f_frsize, (found.f_blocks - found.f_bfree) * found.f_frsize
    return None


# -- NVML


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _DeviceMemory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def devices(library: str = LIBRARY) -> list[dict[str, Any]]:
    """Return the figures of each NVIDIA device; [] without a driver."""
    try:
        nvml = ctypes.CDLL(library)
        if nvml.nvmlInit_v2():
            return []
    except (OSError, AttributeError):
        return []
    try:
        count = _asked(nvml.nvmlDeviceGetCount_v2, ctypes.c_uint())
        return [_device(nvml, index) for index in range(min(count.value if count else 0, MOST_DEVICES))]
    finally:
        nvml.nvmlShutdown()


def _asked(call: Any, answer: Any, *before: Any) -> Any:
    """Return ``answer``, which the NVML function ``call`` fills; None if that reports an error."""
    return None if call(*before, ctypes.byref(answer)) else answer


def _device(nvml: ctypes.CDLL, index: int) -> dict[str, Any]:
    handle = _asked(nvml.nvmlDeviceGetHandleByIndex_v2, ctypes.c_void_p(), ctypes.c_uint(index))
    if handle is None:  # it has fallen off the bus
        return {"index": index}
    busy = _asked(nvml.nvmlDeviceGetUtilizationRates, _Utilization(), handle)
    memory = _asked(nvml.nvmlDeviceGetMemoryInfo, _DeviceMemory(), handle)
    kind, count = ctypes.c_uint(UNCORRECTED), ctypes.c_uint(VOLATILE)
    errors = _asked(nvml.nvmlDeviceGetTotalEccErrors, ctypes.c_ulonglong(), handle, kind, count)
    sensor = ctypes.c_uint(CORE_TEMPERATURE)
    temperature = _asked(nvml.nvmlDeviceGetTemperature, ctypes.c_uint(), handle, sensor)
    power = _asked(nvml.nvmlDeviceGetPowerUsage, ctypes.c_uint(), handle)
    return {
        "index": index,
        "busy": None if busy is None else min(100, busy.gpu) / 100.0,
        "memory_bytes": None if memory is None else memory.total,
        "memory_used_bytes": None if memory is None else memory.used,
        "temperature_c": None if temperature is None else temperature.value,
        "power_w": None if power is None else power.value / 1000.0,
        "ecc_errors": None if errors is None else errors.value,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
