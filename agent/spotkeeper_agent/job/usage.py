"""Uploads once a minute how busy this machine is, while it is a member of its job (``contract/usage.py``).

For each report a thread reads the figures and sends them. On a machine with NVIDIA's driver a separate process
reads the devices (``host/nvml.py``). A report that fails is dropped: no decision reads these figures.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from spotkeeper.contract import codec
from spotkeeper.contract.usage import BYTES, DeviceUsage, NodeUsage, object_name
from spotkeeper_agent.cloud.storage import Bucket, StorageError
from spotkeeper_agent.core.state import MachineState
from spotkeeper_agent.host import usage

EVERY_S = 60.0  # virtual
FLOOR_S = 10.0  # real
READ_S = 20.0  # real; a driver may hang
DRIVER = Path("/dev/nvidiactl")  # the driver's control device: a process each minute would find nothing without it
NVML = Path(usage.__file__).with_name("nvml.py")


def nvidia_devices() -> bytes:
    """Run the reading process if there is a driver; return the devices as JSON.

    Raises:
        OSError, subprocess.SubprocessError: it did not start, failed, or took too long.
    """
    if not DRIVER.exists():
        return b"[]"
    command = [sys.executable, "-I", str(NVML)]
    done = subprocess.run(command, capture_output=True, timeout=READ_S, check=True, stdin=subprocess.DEVNULL)
    return done.stdout


class UsageReports:
    """One machine's reports of how busy it is, one at a time. Only the loop's thread may call :meth:`advance`."""

    def __init__(self, bucket: Bucket, machine: MachineState, devices: Callable[[], bytes] = nvidia_devices) -> None:
        self._bucket, self._machine, self._devices = bucket, machine, devices
        self._due = 0.0  # by the steady clock
        self._ticks = usage.cpu_ticks()  # at the last report
        self._thread: threading.Thread | None = None

    def advance(self) -> None:
        """Begin the next report if it is due."""
        machine = self._machine
        place, doc, now = machine.saved.assignment, machine.doc, machine.clock.steady()
        if now < self._due or place is None or doc is None or machine.member_of(doc) is None:
            return
        if self._thread is not None and self._thread.is_alive():
            return
        self._due = now + max(EVERY_S, FLOOR_S / machine.clock.real_s(1.0))
        name = object_name(place.job, place.node)
        self._thread = threading.Thread(target=self._report, args=(name, place.attempt), name="usage", daemon=True)
        self._thread.start()

    def _report(self, name: str, attempt: int) -> None:
        log = self._machine.log
        try:
            before, self._ticks = self._ticks, usage.cpu_ticks()
            host = usage.host_usage(self._machine.settings.mount, before, self._ticks)
            devices = codec.decode(self._devices()[:BYTES], tuple[DeviceUsage, ...])
            told = NodeUsage(self._machine.clock.now(), attempt, replace(host, devices=devices))
            self._bucket.write(name, msgspec.json.encode(told))
        except (OSError, subprocess.SubprocessError, msgspec.DecodeError, StorageError) as error:
            log.once("usage", "usage.trouble", error=str(error)[:200])
            return
        log.over("usage", "usage.well")
