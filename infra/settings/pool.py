"""A pool of the stack file, typed: one machine shape in a set of zones. Says types and ranges, and judges nothing.

What fields mean together is in ``checks``, ``gcp`` and ``aws`` beside this file. The
descriptions are what editors show, and the table of fields in `docs/operate.md`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from msgspec import Meta, Struct
from spotkeeper.spec.stack import Price

from infra.catalog import AWS_PRICES, BUILT_IN, DISK_PRICES, GCP_ACCELERATOR_PRICES, GCP_PRICES, list_price

SPOT_NOTICE_S = 120  # what both clouds can give
OnDestroy = Literal["delete", "retain", "protect"]
"""What `pulumi destroy` does to data: delete it, leave it in the cloud, or refuse to run."""


def about(text: str) -> Meta:
    """What an editor shows beside a field."""
    return Meta(description=text)


def offers(text: str, values: Iterable[str]) -> Meta:
    """As above, with values that an editor completes; others are as good."""
    return Meta(description=text, extra_json_schema={"anyOf": [{"enum": sorted(values)}, {}]})


GB = Annotated[int, Meta(ge=10, le=65_536, description="gigabytes")]  # the smallest Persistent Disk, the largest disks
Hours = Annotated[float, Meta(gt=0, le=2880, description="Compute Engine ends a job's machine after so many hours")]


class Accelerator(Struct, frozen=True, forbid_unknown_fields=True):
    """Accelerators added to a machine type that does not bring its own (Compute Engine's N1)."""

    type: Annotated[str, offers("gcp: as Compute Engine names it", GCP_ACCELERATOR_PRICES)]
    count: Annotated[int, Meta(ge=1, le=16, description="gcp: so many in each machine")] = 1


class Machine(Struct, frozen=True, forbid_unknown_fields=True):
    """What each machine of the pool is."""

    type: Annotated[str, offers("it says which accelerators there are", [*GCP_PRICES, *AWS_PRICES])]
    accelerator: Annotated[Accelerator | None, about("gcp: added to an n1 machine")] = None
    nproc: (
        Annotated[int, Meta(ge=1, le=64, description="processes on each machine; unset: one an accelerator, or 1")]
        | None
    ) = None
    nic: Annotated[
        Literal["gvnic", "virtio"] | None, about("gcp: the network card; unset: what the machine type has")
    ] = None
    gpu_direct: Annotated[
        Literal["tcpx", "tcpxo", "rdma"] | None,
        about("gcp: GPUs reach the network by themselves, over cards of their own"),
    ] = None
    efa: Annotated[int, Meta(ge=0, le=32, description="aws: Elastic Fabric Adapters, one on each network card")] = 0

    def processes(self) -> int:
        if self.nproc is not None:
            return self.nproc
        return self.accelerator.count if self.accelerator else BUILT_IN.get(self.type, ("", 1))[1]

    def has_accelerator(self) -> bool:
        return self.accelerator is not None or self.type in BUILT_IN


class BootDisk(Struct, frozen=True, forbid_unknown_fields=True):
    """Stateless: dies with its machine."""

    size_gb: GB = 50
    type: Annotated[
        str, offers("unset: pd-balanced (hyperdisk-balanced where a machine has no other), gp3", DISK_PRICES)
    ] = ""
    device: Annotated[
        str,
        about("aws: the image's root device; unset: /dev/sda1 (Ubuntu's; /dev/xvda is Amazon Linux's and Debian's)"),
    ] = ""


class DataDisk(Struct, frozen=True, forbid_unknown_fields=True):
    """The retained disk of a rank (spot pool) or of a node (static pool)."""

    size_gb: GB
    type: Annotated[
        str, offers("unset: pd-balanced (hyperdisk-balanced where a machine has no other), gp3", DISK_PRICES)
    ] = ""
    iops: (
        Annotated[int, Meta(ge=100, le=350_000, description="operations a second, of types that are bought by them")]
        | None
    ) = None
    mb_s: (
        Annotated[int, Meta(ge=10, le=10_000, description="megabytes a second, of types that are bought by them")]
        | None
    ) = None
    on_destroy: Annotated[
        OnDestroy, about("static pools: what a destroy does to it; a rank's disk goes with its stack")
    ] = "delete"


class Placement(Struct, frozen=True, forbid_unknown_fields=True):
    """Where the machines of one zone stand to each other; one policy or group for each pool and zone."""

    strategy: Annotated[
        Literal["compact", "cluster", "spread"] | None,
        about("near each other, for the network (compact on gcp, cluster on aws; unset: that), or on hardware apart"),
    ] = None
    max_distance: (
        Annotated[int, Meta(ge=1, le=3, description="gcp: compact: at most so far apart; 1 is one rack")] | None
    ) = None


class Pool(Struct, frozen=True, forbid_unknown_fields=True):
    """A machine shape in a set of zones."""

    name: Annotated[str, about("a letter, then letters, digits and -, at most 24")]
    kind: Annotated[
        Literal["spot", "static"], about("spot: machines come and go; static: always on, on-demand, in Pulumi's state")
    ]
    size: Annotated[int, Meta(ge=1, le=10_000, description="static: how many nodes; spot: at most so many")]
    machine: Machine
    disk: DataDisk
    zones: Annotated[
        tuple[str, ...], about("in the order to try first; spot pools: unset means every zone of the stack")
    ] = ()
    boot_disk: BootDisk = BootDisk()
    image: Annotated[str, about("unset: the stack's")] = ""
    placement: Placement | None = None
    max_on_demand: (
        Annotated[int, Meta(ge=0, le=10_000, description="so many of `size` may be on-demand; unset: all of them")]
        | None
    ) = None
    notice_s: (
        Annotated[int, Meta(ge=0, le=SPOT_NOTICE_S, description="seconds that a preemption is told before; unset: 120")]
        | None
    ) = None
    max_run_hours: Annotated[Hours | None, about("gcp: unset: limits.max_run_hours")] = None
    prices: Annotated[dict[str, Price], about("USD a machine-hour by zone; the rest comes from infra/catalog.py")] = {}

    def price(self, zone: str) -> Price | None:
        accelerator = self.machine.accelerator
        listed = list_price(
            self.machine.type, accelerator.type if accelerator else None, accelerator.count if accelerator else 0
        )
        return self.prices.get(zone, listed)

    def on_demand_nodes(self) -> int:
        """How many nodes may be bought on-demand at once; static nodes are not bought by reconcile."""
        if self.kind == "static":
            return 0
        return self.size if self.max_on_demand is None else self.max_on_demand

    def notice_seconds(self) -> int:
        return SPOT_NOTICE_S if self.notice_s is None else self.notice_s

    def max_run_s(self) -> int | None:
        """The longest life of one of its dynamic machines, in seconds; None: no limit."""
        return None if self.max_run_hours is None else int(self.max_run_hours * 3600)

    def node_zone(self, index: int) -> str:
        """Where static node ``index`` lives: the zones in turn."""
        return self.zones[index % len(self.zones)]
