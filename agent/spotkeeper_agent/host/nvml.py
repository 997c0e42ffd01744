"""Reads NVIDIA devices by NVML, prints their figures as JSON, and ends.

The agent runs this file once a minute as a separate process, so that NVML's library, which takes 20 MB and may hang
with its driver, is never in the agent. It imports only the standard library. A figure that cannot be read is null.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

MOST_DEVICES = 64
LIBRARY = "libnvidia-ml.so.1"
UNCORRECTED, VOLATILE = 1, 0  # NVML's kinds of ECC errors: not corrected, since the driver was loaded
CORE_TEMPERATURE = 0


def main() -> int:
    print(json.dumps(devices()))
    return 0


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
    sys.exit(main())
