"""How busy a node's machine is: ``jobs/<job>/logs/usage/<node>.json``, overwritten once a minute by its agent.

Machines may write this prefix, so a reader bounds and checks the object.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from spotkeeper.contract import codec

BYTES = 32 << 10  # of an object; 64 devices take 15 KB

Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Size = Annotated[int, Meta(ge=0, le=2**53)]


class DeviceUsage(Struct, frozen=True, forbid_unknown_fields=True):
    """An accelerator; None: unknown. ``ecc_errors``: uncorrected memory errors, counted since the driver was loaded."""

    index: Annotated[int, Meta(ge=0, lt=64)]
    busy: Share | None = None  # of the last sample period, as the driver reports it
    memory_bytes: Size | None = None
    memory_used_bytes: Size | None = None
    temperature_c: Annotated[float, Meta(ge=-273.15, le=1000.0)] | None = None
    power_w: Annotated[float, Meta(ge=0.0, le=1e5)] | None = None
    ecc_errors: Size | None = None


class HostUsage(Struct, frozen=True, forbid_unknown_fields=True):
    """A machine's figures; None: unknown. ``disk_bytes``: of the data disk, if one is mounted."""

    cpus: Annotated[int, Meta(ge=0, le=1 << 16)]
    cpu: Share | None = None
    memory_bytes: Size | None = None
    memory_used_bytes: Size | None = None
    disk_bytes: Size | None = None
    disk_used_bytes: Size | None = None
    devices: Annotated[tuple[DeviceUsage, ...], Meta(max_length=64)] = ()


class NodeUsage(Struct, frozen=True, forbid_unknown_fields=True):
    """How busy a node's machine was at one moment. ``at``: virtual unix seconds."""

    at: Annotated[float, Meta(ge=0.0)]
    attempt: Annotated[int, Meta(ge=0)]
    host: HostUsage


def object_name(job: str, node: int) -> str:
    return f"jobs/{job}/logs/usage/{node}.json"


def read_usage(data: bytes) -> NodeUsage | None:
    """Decode an object; None if a machine has written something else."""
    if len(data) > BYTES:
        return None
    try:
        usage = codec.decode(data, NodeUsage)
    except msgspec.DecodeError:
        return None
    devices = usage.host.devices
    return usage if len({device.index for device in devices}) == len(devices) else None
