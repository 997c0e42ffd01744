"""Plain values: machine types with prices, zones, and the duration of each step of an operation.

Durations are virtual seconds, close to the shortest that clients see at Compute Engine, so that a demo hardly waits for
operations.
"""

from __future__ import annotations

import re

from msgspec import Struct

from spotkeeper.contract.stack import LOCAL_PROJECT

ZONES = ("us-central1-a", "us-central1-b", "us-central1-c")
PROJECT = LOCAL_PROJECT
PROJECT_NUMBER = 424242424242
DEFAULT_SERVICE_ACCOUNT = f"{PROJECT_NUMBER}-compute@developer.gserviceaccount.com"


class Timing(Struct, frozen=True):
    """How many virtual seconds each step takes."""

    accept_s: float = 1.0  # an operation is PENDING
    stage_s: float = 4.0  # PROVISIONING -> STAGING
    start_s: float = 8.0  # STAGING -> RUNNING
    boot_s: float = 20.0  # RUNNING -> the startup script
    stockout_s: float = 6.0  # how long the API lists a VM that fails with a stockout
    attach_s: float = 3.0
    detach_s: float = 3.0
    disk_s: float = 3.0
    snapshot_s: float = 12.0
    delete_s: float = 4.0  # after the guest is off
    quick_s: float = 2.0  # templates, labels, networks
    host_error_s: float = 30.0  # from a host's failure until its VM starts on another host
    spot_off_s: float = 30.0  # ACPI off to power off, spot ("best effort")
    standard_off_s: float = 90.0  # ACPI off to power off, for a stop or delete of a standard VM
    grants_s: float = 0.0  # until an IAM binding takes effect; on Google Cloud this takes minutes
    wait_s: float = 120.0  # longest operations.wait request


class MachineType(Struct, frozen=True):
    """A machine type. ``price``: the on-demand list price in us-central1, USD per hour, rounded."""

    name: str
    cpus: int
    memory_mb: int
    price: float
    accelerator: str = ""
    accelerators: int = 0


MACHINE_TYPES = (
    MachineType("e2-small", 2, 2048, 0.017),
    MachineType("e2-medium", 2, 4096, 0.034),
    MachineType("e2-standard-2", 2, 8192, 0.067),
    MachineType("e2-standard-4", 4, 16384, 0.134),
    MachineType("e2-standard-8", 8, 32768, 0.268),
    MachineType("n1-standard-1", 1, 3840, 0.048),
    MachineType("n1-standard-4", 4, 15360, 0.190),
    MachineType("n1-standard-8", 8, 30720, 0.380),
    MachineType("n1-standard-16", 16, 61440, 0.760),
    MachineType("n2-standard-4", 4, 16384, 0.194),
    MachineType("n2-standard-8", 8, 32768, 0.388),
    MachineType("n2-standard-16", 16, 65536, 0.777),
    MachineType("c3-standard-8", 8, 32768, 0.402),
    MachineType("c3-standard-22", 22, 90112, 1.106),
    MachineType("g2-standard-4", 4, 16384, 0.707, "nvidia-l4", 1),
    MachineType("g2-standard-8", 8, 32768, 0.854, "nvidia-l4", 1),
    MachineType("g2-standard-12", 12, 49152, 1.000, "nvidia-l4", 1),
    MachineType("g2-standard-24", 24, 98304, 2.000, "nvidia-l4", 2),
    MachineType("g2-standard-48", 48, 196608, 4.000, "nvidia-l4", 4),
    MachineType("a2-highgpu-1g", 12, 87040, 3.673, "nvidia-tesla-a100", 1),
    MachineType("a2-highgpu-2g", 24, 174080, 7.347, "nvidia-tesla-a100", 2),
    MachineType("a2-highgpu-4g", 48, 348160, 14.694, "nvidia-tesla-a100", 4),
    MachineType("a2-highgpu-8g", 96, 696320, 29.387, "nvidia-tesla-a100", 8),
    MachineType("a2-ultragpu-1g", 12, 174080, 5.069, "nvidia-a100-80gb", 1),
    MachineType("a2-ultragpu-8g", 96, 1392640, 40.550, "nvidia-a100-80gb", 8),
    MachineType("a3-highgpu-1g", 26, 239616, 11.061, "nvidia-h100-80gb", 1),
    MachineType("a3-highgpu-8g", 208, 1916928, 88.250, "nvidia-h100-80gb", 8),
)
_BY_NAME = {machine.name: machine for machine in MACHINE_TYPES}

EGRESS_USD_GB = 0.02  # between two regions: the list price within North America

DISK_TYPES = ("pd-standard", "pd-balanced", "pd-ssd", "pd-extreme", "hyperdisk-balanced")

NAME = re.compile(r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?\Z")
NAME_PATTERN = "(?:[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?)"
LABEL_KEY = re.compile(r"[a-z][-_a-z0-9]{0,62}\Z")
LABEL_VALUE = re.compile(r"[-_a-z0-9]{0,63}\Z")


def machine_type(name: str) -> MachineType | None:
    return _BY_NAME.get(name)


def region_of(zone: str) -> str:
    return zone.rsplit("-", 1)[0]
