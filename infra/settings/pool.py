"""The types of a pool in the stack file: one machine shape in a set of zones, each field with its type and range.

``checks``, ``gcp`` and ``aws`` beside this file check combinations of fields. Editors show the fields' descriptions,
and the table in `docs/stack-file.md` is made from them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Literal

from msgspec import Meta, Struct

from infra.catalog import AWS_PRICES, BUILT_IN, DISK_PRICES, GCP_ACCELERATOR_PRICES, GCP_PRICES, list_price
from spotkeeper.contract.stack import Price, ReservedCapacity

BLOCK_ENDS_S = 1800.0  # EC2 begins to terminate a capacity block's machines 30 minutes before its end
SPOT_NOTICE_S = 120  # the longest preemption notice that both clouds give
OnDestroy = Literal["delete", "retain", "protect"]
"""What `pulumi destroy` does to data: delete it, leave it in the cloud, or refuse to run."""


def about(text: str) -> Meta:
    """Describe a field, for editors and `docs/stack-file.md`."""
    return Meta(description=text)


def offers(text: str, values: Iterable[str]) -> Meta:
    """Describe a field and suggest values that an editor completes; other values are valid too."""
    return Meta(description=text, extra_json_schema={"anyOf": [{"enum": sorted(values)}, {}]})


GB = Annotated[int, Meta(ge=10, le=65_536, description="gigabytes")]  # bounds over all disk types
Hours = Annotated[float, Meta(gt=0, le=2880, description="hours after which Compute Engine ends a job's machine")]


class Accelerator(Struct, frozen=True, forbid_unknown_fields=True):
    """Accelerators added to a machine type that has no accelerators of its own (Compute Engine's N1)."""

    type: Annotated[str, offers("gcp: accelerator type, by Compute Engine's name", GCP_ACCELERATOR_PRICES)]
    count: Annotated[int, Meta(ge=1, le=16, description="gcp: number in each machine")] = 1


class Machine(Struct, frozen=True, forbid_unknown_fields=True):
    """The machine type of a pool, with its accelerators and network cards."""

    type: Annotated[str, offers("machine type, which determines the accelerators", [*GCP_PRICES, *AWS_PRICES])]
    accelerator: Annotated[Accelerator | None, about("gcp: accelerators added to an n1 machine")] = None
    nproc: (
        Annotated[int, Meta(ge=1, le=64, description="processes per machine; unset: one per accelerator, or 1")] | None
    ) = None
    nic: Annotated[
        Literal["gvnic", "virtio"] | None, about("gcp: the network card; unset: what the machine type has")
    ] = None
    gpu_direct: Annotated[
        Literal["tcpx", "tcpxo", "rdma"] | None,
        about("gcp: the variant of GPUDirect, with its dedicated network cards for GPUs"),
    ] = None
    efa: Annotated[int, Meta(ge=0, le=32, description="aws: how many network cards get an Elastic Fabric Adapter")] = 0

    def processes(self) -> int:
        if self.nproc is not None:
            return self.nproc
        return self.accelerator.count if self.accelerator else BUILT_IN.get(self.type, ("", 1))[1]

    def boots_slowly(self) -> bool:
        """Return whether this is a large accelerated EC2 machine, which needs 10 minutes or more for a cold boot."""
        return re.match(r"(p|trn)\d[\w-]*\.", self.type) is not None

    def has_accelerator(self) -> bool:
        return self.accelerator is not None or self.type in BUILT_IN


class BootDisk(Struct, frozen=True, forbid_unknown_fields=True):
    """The boot disk of a machine; it holds no state and is deleted with the machine."""

    size_gb: GB = 50
    type: Annotated[
        str, offers("disk type; unset: gcp: pd-balanced, or hyperdisk-balanced where needed; aws: gp3", DISK_PRICES)
    ] = ""
    device: Annotated[
        str,
        about("aws: root device of the image; unset: /dev/sda1 (Ubuntu; Amazon Linux and Debian use /dev/xvda)"),
    ] = ""


class DataDisk(Struct, frozen=True, forbid_unknown_fields=True):
    """The data disk of a node (spot pool) or of a static machine; it outlives the machine."""

    size_gb: GB
    type: Annotated[
        str, offers("disk type; unset: gcp: pd-balanced, or hyperdisk-balanced where needed; aws: gp3", DISK_PRICES)
    ] = ""
    iops: Annotated[int, Meta(ge=100, le=350_000, description="IOPS, for disk types with provisioned IOPS")] | None = (
        None
    )
    mb_s: (
        Annotated[int, Meta(ge=10, le=10_000, description="MB/s, for disk types with provisioned throughput")] | None
    ) = None
    on_destroy: Annotated[
        OnDestroy, about("static pools: what a destroy does to the disks; other disks are always deleted")
    ] = "delete"


class Placement(Struct, frozen=True, forbid_unknown_fields=True):
    """The physical placement of machines in a zone; each pool has a placement policy or group per zone."""

    strategy: Annotated[
        Literal["compact", "cluster", "spread"] | None,
        about("compact (gcp) or cluster (aws), the default: close together; spread: on separate hardware"),
    ] = None
    max_distance: (
        Annotated[int, Meta(ge=1, le=3, description="gcp: largest distance in compact placement; 1 is one rack")] | None
    ) = None


class Reservation(Struct, frozen=True, forbid_unknown_fields=True):
    """Reserved capacity that its owner pays for anyway: machines in it cost a job nothing."""

    name: Annotated[
        str, about("gcp: name of the reservation; aws: id of the capacity reservation or capacity block, cr-...")
    ]
    zone: Annotated[str, about("its zone, one of the pool's")]
    count: Annotated[int, Meta(ge=1, le=10_000, description="number of its machines for this stack")]
    starts: Annotated[str, about("when it starts, such as 2026-12-01T11:30:00Z; unset: it has started")] = ""
    ends: Annotated[str, about("when it ends, as its cloud shows it; jobs move before; unset: it has no end")] = ""
    block: Annotated[bool, about("aws: a capacity block, whose machines EC2 ends 30 minutes early")] = False

    def state(self) -> ReservedCapacity:
        """Return it as the function reads it: its times are unix seconds, and a block ends when EC2 ends it."""
        starts, ends = moment(self.starts), moment(self.ends)
        return ReservedCapacity(
            name=self.name,
            zone=self.zone,
            count=self.count,
            starts=None if starts is None else starts.timestamp(),
            ends=None if ends is None else ends.timestamp() - BLOCK_ENDS_S * self.block,
            block=self.block,
        )


def moment(text: str) -> datetime | None:
    """Return the time in a text; None if the text is "", no time, or a time without its zone."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo is not None else None


class Pool(Struct, frozen=True, forbid_unknown_fields=True):
    """A machine shape in a set of zones."""

    name: Annotated[str, about("a letter, then letters, digits and -, at most 24")]
    kind: Annotated[
        Literal["spot", "static"],
        about("spot: machines that jobs request; static: always-on on-demand machines, declared by Pulumi"),
    ]
    size: Annotated[int, Meta(ge=1, le=10_000, description="static: number of machines; spot: maximum number at once")]
    machine: Machine
    disk: DataDisk
    zones: Annotated[
        tuple[str, ...], about("zones in order of preference; spot pools: unset means every zone of the stack")
    ] = ()
    boot_disk: BootDisk = BootDisk()
    image: Annotated[str, about("machine image; unset: the stack's")] = ""
    images: Annotated[
        dict[str, str], about("aws: `image` in each other region of its zones, by region; unset: the stack's")
    ] = {}
    placement: Placement | None = None
    max_on_demand: (
        Annotated[int, Meta(ge=0, le=10_000, description="maximum number of on-demand machines; unset: `size`")] | None
    ) = None
    notice_s: (
        Annotated[int, Meta(ge=0, le=SPOT_NOTICE_S, description="seconds of a preemption notice; unset: 120")] | None
    ) = None
    max_run_hours: Annotated[Hours | None, about("gcp: longest life, hours; unset: `limits.max_run_hours`")] = None
    reservations: Annotated[
        tuple[Reservation, ...],
        Meta(max_length=100, description="reserved capacity for machines of this type, preferred while it is idle"),
    ] = ()
    prices: Annotated[dict[str, Price], about("USD per machine-hour by zone; unset: that of infra/catalog.py")] = {}

    def price(self, zone: str) -> Price | None:
        accelerator = self.machine.accelerator
        listed = list_price(
            self.machine.type, accelerator.type if accelerator else None, accelerator.count if accelerator else 0
        )
        return self.prices.get(zone, listed)

    def on_demand_machines(self) -> int:
        """Return how many on-demand machines reconcile may have at once; 0 for a static pool, which needs none."""
        if self.kind == "static":
            return 0
        return self.size if self.max_on_demand is None else self.max_on_demand

    def notice_seconds(self) -> int:
        return SPOT_NOTICE_S if self.notice_s is None else self.notice_s

    def max_run_s(self) -> int | None:
        """Return the longest life of a dynamic machine of the pool, in seconds; None: no limit."""
        return None if self.max_run_hours is None else int(self.max_run_hours * 3600)

    def machine_zone(self, index: int) -> str:
        """Return the zone of static machine ``index``; the pool's machines are distributed over its zones in turn."""
        return self.zones[index % len(self.zones)]
