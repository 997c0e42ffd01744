"""Documents of a stack: ``stack/pools.json``, the pools that Pulumi declared; ``stack/tick``, the last ticks' results.

The Pulumi program writes pools.json as one bucket object, so resizing a pool updates only that object. All times are
virtual.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum
from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from spotkeeper.contract.notification import ChannelState

TICK_PATH = "stack/tick"
RENEWED_S = 300.0  # interval of notes of success: one note per tick would cost $0.22 a month, this interval costs $0.04
MAY_FAIL = 2  # consecutive ticks that may fail before the command reports it
LATE = 3  # ticks that a note may be overdue before the function counts as failing
MAX_REASON = 300
DEFAULT_TEAM = "default"
LOCAL_PROJECT = "local"  # project of a one-machine cloud; ids of projects of Google Cloud are longer


class Model(str, Enum):
    """How a machine is bought: the provisioning model."""

    SPOT = "spot"
    ON_DEMAND = "on-demand"
    STATIC = "static"
    RESERVED = "reserved"  # in capacity that is reserved, and so paid for already

    @property
    def template(self) -> str:
        """The key of its machine template: reserved capacity is used by on-demand machines that name it."""
        return Model.ON_DEMAND.value if self is Model.RESERVED else self.value


def region_of(zone: str) -> str:
    """Return the region of a zone such as ``us-east-1a`` or ``us-east1-b``; any other name is its own region."""
    return zone[:-2] if zone[-2:-1] == "-" else zone[:-1] if zone[-2:-1].isdecimal() else zone


def within(zone: str, place: str) -> bool:
    """Return whether a zone is this zone, or lies in this region."""
    return place in (zone, region_of(zone))


def template_key(model: str, region: str, first: str) -> str:
    """Return a region's key in ``PoolState.templates``: ``spot`` in the first, else ``us-east1/spot``."""
    return model if region == first else f"{region}/{model}"


class StaticMachine(Struct, frozen=True, forbid_unknown_fields=True):
    """An always-on, on-demand machine that Pulumi declares, with its own disk that outlives the machine."""

    name: str
    zone: str


class Price(Struct, frozen=True, forbid_unknown_fields=True, rename={"on_demand": "on-demand"}):
    """USD per machine-hour."""

    on_demand: Annotated[float, Meta(ge=0, description="USD per machine-hour")]
    spot: Annotated[float, Meta(ge=0, description="USD per machine-hour; spot pools need it")] | None = None

    def of(self, model: Model) -> float | None:
        """Return what a machine costs; nothing in reserved capacity, which costs the same without machines."""
        if model is Model.RESERVED:
            return 0.0
        return self.spot if model is Model.SPOT else self.on_demand


class ReservedCapacity(Struct, frozen=True, forbid_unknown_fields=True):
    """Reserved capacity of a cloud: an owner pays for its machines whether they run or not. Times are unix seconds.

    ``name``: of a Compute Engine reservation; the id (``cr-...``) of an EC2 capacity reservation or capacity block.
    ``ends``: when the last machine in it must be gone.
    """

    name: str
    zone: str
    count: Annotated[int, Meta(ge=1, le=10_000)]  # machines at once
    starts: float | None = None  # None: it has started
    ends: float | None = None  # None: unknown
    block: bool = False  # an EC2 capacity block, which a launch must name as such

    @property
    def key(self) -> str:
        """Identify it within its pool: Compute Engine's names are unique only in their zone."""
        return f"{self.zone}/{self.name}"

    def usable(self, now: float, for_s: float = 0.0) -> bool:
        """Whether machines may run in it from now on for this long."""
        begun = self.starts is None or now >= self.starts
        return begun and (self.ends is None or now + for_s < self.ends)


class Interface(Struct, frozen=True, forbid_unknown_fields=True):
    """A network interface of an EC2 launch; ``kind`` is EC2's interface type."""

    card: Annotated[int, Meta(ge=0)]
    device: Annotated[int, Meta(ge=0)]
    kind: Literal["interface", "efa", "efa-only"] = "efa"


class Abroad(Struct, frozen=True, forbid_unknown_fields=True):
    """What an EC2 pool has in a region other than home, in place of the fields of the same names."""

    security_groups: tuple[str, ...] = ()
    disk_key: str = ""
    tags: dict[str, str] = {}  # in addition to the pool's


class PoolState(Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    kind: Literal["spot", "static"]
    machine_type: str
    zones: Annotated[tuple[str, ...], Meta(min_length=1)]
    nproc: Annotated[int, Meta(ge=1, le=64)]  # processes per node: GPUs, or 1
    max_machines: Annotated[int, Meta(ge=0, le=10_000)]
    max_on_demand: Annotated[int, Meta(ge=0, le=10_000)]  # on-demand machines at once
    disk_gb: Annotated[int, Meta(ge=1, le=65_536)]
    disk_type: str
    prices: dict[str, Price]  # by zone
    templates: dict[str, str] = {}  # ``template_key`` -> template: its self link, or its id on EC2
    placement: dict[str, str] = {}  # zone -> placement policy's self link, or the group's name on EC2
    machines: tuple[StaticMachine, ...] = ()
    disk_usd_gb_month: Annotated[float, Meta(ge=0)] | None = None  # a data disk's price; None: unknown
    # EC2 only. A launch names either a subnet, with the security groups in its template, or whole interfaces. EC2
    # refuses a subnet together with interfaces, even the template's, so templates contain no interfaces.
    subnets: dict[str, str] = {}  # zone -> subnet id
    interfaces: tuple[Interface, ...] = ()  # for a pool with EFA; (): one plain interface
    security_groups: tuple[str, ...] = ()  # security groups of ``interfaces``
    disk_iops: Annotated[int, Meta(ge=1)] | None = None  # None: the disk type's default
    disk_mbps: Annotated[int, Meta(ge=1)] | None = None  # MiB/s
    disk_key: str = ""  # KMS key of data disks; "": the account's default key
    # A fixed version number, so that a repeated call makes the same machine after a newer `pulumi up`.
    template_versions: dict[str, str] = {}  # ``template_key`` -> version of its launch template
    tags: dict[str, str] = {}  # for every machine, in addition to those that identify it; agents read them
    reservations: tuple[ReservedCapacity, ...] = ()  # reserved capacity for machines of this type
    abroad: dict[str, Abroad] = {}  # by region

    @property
    def reserved(self) -> int:
        """The machines of all its reserved capacity, whether that has started or not."""
        return sum(one.count for one in self.reservations)

    def reservation(self, zone: str, name: str | None) -> ReservedCapacity | None:
        return next((one for one in self.reservations if (one.zone, one.name) == (zone, name)), None)

    def disk_key_in(self, region: str) -> str:
        """Return the KMS key of data disks in a region; "": the account's default key there."""
        return self.abroad[region].disk_key if region in self.abroad else self.disk_key

    def only(self, zones: Collection[str]) -> PoolState:
        """Return the pool with only its zones among these, and with what it has in those zones."""
        own = tuple(zone for zone in self.zones if zone in zones)
        if own == self.zones:
            return self
        return replace(
            self,
            zones=own,
            prices={zone: price for zone, price in self.prices.items() if zone in own},
            machines=tuple(machine for machine in self.machines if machine.zone in own),
            reservations=tuple(one for one in self.reservations if one.zone in own),
        )

    def dearest(self, model: Model) -> float:
        """Return a machine's USD per hour in the most expensive zone. Used for grants, which name no zone."""
        known = (price.of(model) for price in self.prices.values())
        return max((usd for usd in known if usd is not None), default=0.0)


class Fallback(Struct, frozen=True, forbid_unknown_fields=True):
    """When a job falls back to on-demand machines, and for how long. Durations are virtual seconds."""

    losses: Annotated[int, Meta(ge=1)] = 3  # losses within the window, plus one per node, that start a fallback
    window_s: Annotated[float, Meta(gt=0)] = 3600.0
    short_life_s: Annotated[float, Meta(ge=0)] = 600.0  # a spot machine that lived shorter was not worth the restart
    short_lives: Annotated[int, Meta(ge=1)] = 3  # consecutive short lives that start a fallback
    on_demand_s: Annotated[float, Meta(gt=0)] = 1800.0  # length of a fallback


class TeamState(Struct, frozen=True, forbid_unknown_fields=True):
    """A team whose jobs share machines. A user who is no member of any team belongs to the team ``default``."""

    name: str
    members: tuple[str, ...] = ()  # as the function's verified tokens name them: emails, or ARNs on AWS
    share: Annotated[float, Meta(gt=0)] = 1.0  # relative to the shares of the other teams
    max_machines: Annotated[int, Meta(ge=1)] | None = None  # at once; None: only the stack's limits
    max_usd_hour: Annotated[float, Meta(gt=0)] | None = None  # at list prices
    max_usd_month: Annotated[float, Meta(gt=0)] | None = None  # in a calendar month, UTC, at list prices
    high: tuple[str, ...] | None = None  # members who may use `priority: high`; None: all


class StackState(Struct, frozen=True, forbid_unknown_fields=True):
    stack: str
    cloud: Literal["gcp", "aws"]
    project: str  # on AWS the account id
    region: str  # the home region: function, schedule, bucket
    bucket: str
    pools: tuple[PoolState, ...]
    function_url: str = ""
    node_identity: str = ""  # email of the nodes' service account, or ARN of their role: only it may say hello
    bundle_sha256: str = ""
    lease_minutes: Annotated[int, Meta(ge=1)] = 120
    boot_deadline_s: Annotated[int, Meta(ge=1)] = 480
    fallback: Fallback = Fallback()
    max_run_s: Annotated[int, Meta(ge=1)] | None = None
    job_identity: str = ""  # service account or role that jobs run as; "": none
    max_machines: Annotated[int, Meta(ge=1)] | None = None  # dynamic machines in all pools; None: the pools' sum
    max_usd_hour: Annotated[float, Meta(gt=0)] | None = None  # their total cost at list prices, USD per hour
    tick_minutes: Annotated[int, Meta(ge=1)] = 1  # interval of the schedule's ticks
    ssh: bool = False  # whether the stack file allows shells on its machines
    channels: tuple[ChannelState, ...] = ()
    teams: tuple[TeamState, ...] = ()  # without the team `default`, if the stack file does not mention it
    regions: tuple[str, ...] = ()  # all regions, in the stack file's order; (): only ``region``
    warm_usd: Annotated[float, Meta(gt=0)] | None = None  # a month, for each job's warm copies abroad; None: no copies
    egress: dict[str, dict[str, float]] = {}  # USD per GB from a region to each of the others
    bucket_regions: tuple[str, ...] = ()  # of `regions`, those that the bucket is in; (): the first

    @property
    def size(self) -> int:
        """How many machines the stack allows at once, static ones included."""
        dynamic = sum(pool.max_machines for pool in self.pools if pool.kind != "static")
        static = sum(len(pool.machines) for pool in self.pools if pool.kind == "static")
        return static + min(dynamic, self.max_machines or dynamic)

    def nominal(self, name: str) -> float:
        """Return a team's share of all machines if every team wants its own."""
        shares = {team.name: team.share for team in self.teams} | {name: self.team(name).share}
        return self.size * shares[name] / sum(shares.values())

    def team(self, name: str) -> TeamState:
        """Return this team; for an unknown name, a team with a share of 1 and no limits."""
        return next((team for team in self.teams if team.name == name), None) or TeamState(name)

    def team_of(self, user: str, wanted: str = "") -> TeamState:
        """Return the user's team: ``wanted`` if the user is its member, else the first that lists the user.

        A user whom no team lists belongs to the team ``default``.
        """
        own = [team for team in self.teams if user in team.members]
        found = next((team for team in own if team.name == wanted), None)
        return found or next(iter(own), None) or self.team(DEFAULT_TEAM)

    def pool(self, name: str) -> PoolState | None:
        return next((pool for pool in self.pools if pool.name == name), None)

    def template(self, pool: str, model: Model, zone: str) -> str:
        """Return the template from which a pool's machines of this model are made in a zone; "": there is none."""
        found = self.pool(pool)
        return found.templates.get(self.template_key(model, zone), "") if found is not None else ""

    def template_key(self, model: Model, zone: str) -> str:
        return template_key(model.template, self.region_of(zone), next(iter(self.regions), self.region))

    def region_of(self, zone: str) -> str:
        """Return the region of one of the stack's zones; with a single region, zones can have any names."""
        return region_of(zone) if self.regions else self.region

    def egress_usd(self, source: str, target: str, gb: float) -> float:
        """Return what a transfer between two regions costs, USD; 0 within a region, and if the price is unknown."""
        return 0.0 if source == target else gb * self.egress.get(source, {}).get(target, 0.0)

    def zones(self) -> tuple[str, ...]:
        """Return every zone of the stack's pools."""
        return tuple(sorted({zone for pool in self.pools for zone in pool.zones}))


class TickNote(Struct, frozen=True):
    """The result of the last ticks. The function writes it when the result changes, and every ``RENEWED_S`` seconds.

    Attributes:
        succeeded: time of the last noted success; the last success can be up to ``RENEWED_S`` later.
        failing: since when every tick has failed; None: the last tick succeeded.
        failed: time of the last noted failure.
        reason: why that tick failed.
    """

    succeeded: float = 0.0
    failing: float | None = None
    failed: float = 0.0
    reason: str = ""


def tick_note(note: TickNote | None, now: float, reason: str) -> TickNote | None:
    """Return the note to write after a tick; None if the stored note is still right.

    ``reason``: why the tick failed; "" if it succeeded.
    """
    if not reason:
        fresh = note is not None and note.failing is None and 0 <= now - note.succeeded < RENEWED_S
        return None if fresh else TickNote(succeeded=now)
    note, reason = note or TickNote(), reason[:MAX_REASON]
    if note.failing is not None and note.reason == reason and 0 <= now - note.failed < RENEWED_S:
        return None
    return replace(note, failing=now if note.failing is None else note.failing, failed=now, reason=reason)


def tick_silence(note: TickNote | None, now: float, tick_minutes: int, log: str = "its log") -> str:
    """Return a warning such as ``no tick succeeded for 12 minutes: the cloud answered in no zone``.

    The warning is "" while ticks succeed or nothing is known. ``log``: where the user finds the function's log.
    """
    every_s = 60.0 * tick_minutes
    if note is None:
        return ""
    if note.failing is not None:
        since, reason = note.failing, note.reason
        told = now - since >= MAY_FAIL * every_s
    else:
        since, reason = note.succeeded, f"the function does not run, or cannot write its bucket: see {log}"
        told = now - since > max(RENEWED_S, every_s) + LATE * every_s
    return f"no tick succeeded for {(now - since) / 60.0:.0f} minutes: {reason}" if told else ""
