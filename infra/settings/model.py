"""The types of the stack file: every field of `Pulumi.<stack>.yaml` under `spotkeeper:`, with its type and range.

``checks``, ``gcp`` and ``aws`` beside this file check combinations of fields. Editors show the fields' descriptions,
and the table in `docs/stack-file.md` is made from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from infra import naming
from infra.catalog import AWS_WITHOUT_URLS, AWS_ZONES, DISK_PRICES, GCP_DUAL_REGIONS, GCP_ZONES, egress
from infra.settings.pool import Hours, OnDestroy, Pool, about, offers
from spotkeeper.contract.notification import USUAL_EVENTS, ChannelKind, ChannelState, NotifyEvent
from spotkeeper.contract.parse.problem import join
from spotkeeper.contract.stack import Fallback as FallbackState
from spotkeeper.contract.stack import PoolState, StackState, StaticMachine, TeamState, region_of

Alarm = Literal["ticks", "holds", "spend", "orphans"]
ALARMS: tuple[Alarm, ...] = ("ticks", "holds", "spend", "orphans")
OWN_RANGE = "10.40.0.0/16"
BOOT_S, SLOW_BOOT_S = 480, 900


def _from(where: str) -> Meta:
    """Mark a field that does not come from the stack file, so that messages and editors do not suggest it."""
    return Meta(description=f"from {where}", extra={"offered": False})


class Network(Struct, frozen=True, forbid_unknown_fields=True):
    """The machines' network: made from ``cidr``, or an existing one (``vpc``, ``subnets`` or ``from_stack``)."""

    cidr: Annotated[str, about(f"address range of the stack's own network; unset: {OWN_RANGE}")] = ""
    vpc: Annotated[str, about("an existing network: projects/<project>/global/networks/<name>, or vpc-...")] = ""
    subnets: Annotated[
        dict[str, str],
        about("subnets of `vpc`; gcp: by region, projects/.../subnetworks/<name>; aws: by zone, subnet-..."),
    ] = {}
    vpcs: Annotated[dict[str, str], about("aws: the existing networks of the other regions, by region")] = {}
    from_stack: Annotated[
        str, about("<organization>/<project>/<stack>: the Pulumi stack whose outputs give `vpc`, `vpcs` and `subnets`")
    ] = ""
    addresses: Annotated[
        tuple[str, ...],
        about("address ranges of the machines, such as 100.64.0.0/10; unset: the private ranges"),
    ] = ()
    public_ip: Annotated[bool, about("public addresses for machines, if jobs read from outside the cloud")] = False

    def exists(self) -> bool:
        """Return whether the stack uses an existing network, which it neither makes nor deletes."""
        return bool(self.vpc or self.vpcs or self.subnets or self.from_stack)


class Bucket(Struct, frozen=True, forbid_unknown_fields=True):
    """The stack's bucket: all of its state, and its jobs' checkpoints and outputs."""

    name: Annotated[str | None, about("bucket's name; unset: sk-<project or account>-<stack>")] = None
    location: Annotated[str | None, about("gcp: region or multi-region; unset: the stack's region")] = None
    on_destroy: Annotated[OnDestroy, about("what a destroy does to the bucket")] = "delete"


class Limits(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits on machines' lives, their number and their cost, enforced without an operator."""

    lease_minutes: Annotated[
        int, Meta(ge=1, le=1440, description="minutes without reaching the function until a machine powers off")
    ] = 120
    boot_deadline_s: (
        Annotated[
            int,
            Meta(
                ge=30,
                le=3600,
                description="seconds until a machine must say hello; unset: 480; on aws 900 with p or trn types",
            ),
        ]
        | None
    ) = None
    max_run_hours: Annotated[
        Hours | None, about("gcp: longest life of a dynamic machine, hours, unless its pool sets another")
    ] = None
    machines: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=100_000,
                description="maximum number of dynamic machines in all pools; unset: sum of their sizes",
            ),
        ]
        | None
    ) = None
    usd_per_hour: (
        Annotated[float, Meta(gt=0, description="highest USD an hour for all dynamic machines, at list prices")] | None
    ) = None
    warm_copies_usd: (
        Annotated[float, Meta(gt=0, description="USD a month for each job's warm copies abroad; unset: none")] | None
    ) = None

    def max_run_s(self) -> int | None:
        return None if self.max_run_hours is None else int(self.max_run_hours * 3600)


class Fallback(Struct, frozen=True, forbid_unknown_fields=True):
    """How many losses make a job fall back to on-demand machines, and for how long."""

    losses: Annotated[
        int,
        Meta(ge=1, le=1000, description="this many losses in the window, plus one per node, start a fallback"),
    ] = 3
    window_minutes: Annotated[float, Meta(gt=0, le=10080, description="window in which losses count, minutes")] = 60
    short_life_minutes: Annotated[
        float, Meta(ge=0, le=1440, description="minutes below which the life of a lost spot machine counts as short")
    ] = 10
    short_lives: Annotated[
        int, Meta(ge=1, le=100, description="consecutive short lives that start an on-demand fallback")
    ] = 3
    on_demand_minutes: Annotated[
        float, Meta(gt=0, le=10080, description="minutes of an on-demand fallback, before spot is tried again")
    ] = 30

    def state(self) -> FallbackState:
        """Return these settings as the function reads them, in seconds."""
        return FallbackState(
            losses=self.losses,
            window_s=60 * self.window_minutes,
            short_life_s=60 * self.short_life_minutes,
            short_lives=self.short_lives,
            on_demand_s=60 * self.on_demand_minutes,
        )


class Reconcile(Struct, frozen=True, forbid_unknown_fields=True):
    """The function that runs reconcile, and its schedule."""

    tick_minutes: Annotated[int, Meta(ge=1, le=60, description="minutes between ticks")] = 1
    memory_mb: Annotated[int, Meta(ge=256, le=4096, description="memory of the function")] = 512
    timeout_s: Annotated[
        int, Meta(ge=60, le=3600, description="seconds until the cloud ends a request; each ends by itself within 60 s")
    ] = 120
    runtime: Annotated[Literal["python311", "python312", "python313"], about("the function's Python version")] = (
        "python311"
    )
    invokers: Annotated[
        tuple[str, ...], about("further callers of the function: user:kim@acme.dev, serviceAccount:...; aws: ARNs")
    ] = ()


class Agent(Struct, frozen=True, forbid_unknown_fields=True):
    """The Python interpreter and the architecture that the agent runs on."""

    interpreter: Annotated[str, about("Python of the agent: a command or a path in the image")] = "python3"
    python: Annotated[
        Literal["3.10", "3.11", "3.12", "3.13"], about("the interpreter's version, for which the bundle has wheels")
    ] = "3.11"
    arch: Annotated[Literal["x86_64", "aarch64"], about("the machines' architecture, as `uname -m` prints it")] = (
        "x86_64"
    )


class Budget(Struct, frozen=True, forbid_unknown_fields=True):
    """An optional monthly budget; on Google Cloud it needs rights on the billing account."""

    monthly: Annotated[int, Meta(ge=1, description="budget of the stack per month")]
    billing_account: Annotated[str, about("gcp: 0123AB-4567CD-89EF01")] = ""
    currency: Annotated[str, about("currency of the billing account")] = "USD"
    alert_at: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=500)], ...], about("percent of the budget at which an email is sent")
    ] = (50, 90, 100)


class Alerts(Struct, frozen=True, forbid_unknown_fields=True):
    """Alarms that are mailed to the stack's operator."""

    email: Annotated[str, about("address for alarms; unset: no emails")] = ""
    missed_minutes: Annotated[
        int, Meta(ge=2, le=1410, description="minutes without a successful tick before the alarm")
    ] = 5
    about: Annotated[
        tuple[Alarm, ...], about("kinds of alarms: missed ticks, jobs on hold, spending, machines without a job")
    ] = ALARMS


class Channel(Struct, frozen=True, forbid_unknown_fields=True):
    """A channel to which the function sends notifications about jobs' events."""

    name: Annotated[str, about("name by which job files choose it: a-z, 0-9 and -, at most 32 characters")]
    kind: Annotated[ChannelKind, about("form of the messages")]
    address: Annotated[
        str,
        about("https address, or where it is: gcp-secret://..., aws-secret://<ARN>, aws-parameter://<ARN>"),
    ]
    events: Annotated[
        tuple[NotifyEvent, ...], about("events sent to it for jobs whose file does not name the channel; []: none")
    ] = USUAL_EVENTS


class Team(Struct, frozen=True, forbid_unknown_fields=True):
    """A team that shares the stack's machines with other teams. The team `default` has the users whom no team lists."""

    members: Annotated[
        tuple[str, ...],
        Meta(max_length=1000, description="gcp: email addresses; aws: ARNs of users and roles; local: user names"),
    ] = ()
    share: Annotated[
        float, Meta(gt=0, le=10_000, description="part of the machines, relative to the shares of other teams")
    ] = 1
    max_machines: (
        Annotated[int, Meta(ge=1, le=100_000, description="maximum number of machines, static ones included")] | None
    ) = None
    max_usd_per_hour: (
        Annotated[float, Meta(gt=0, description="highest USD an hour for its machines, at list prices")] | None
    ) = None
    max_usd_per_month: (
        Annotated[float, Meta(gt=0, description="highest USD in a calendar month (UTC), at list prices")] | None
    ) = None
    high: Annotated[
        tuple[str, ...] | None, about("members who may use `priority: high`; unset: all of them; []: nobody")
    ] = None


class Endpoints(Struct, frozen=True, forbid_unknown_fields=True):
    """Addresses of the cloud's APIs. Only stacks in the one-machine cloud set them; all others use the cloud's own."""

    compute: Annotated[str, about("address of the compute API; unset: Compute Engine's or EC2's")] = ""
    storage: Annotated[str, about("address of the storage API; unset: Cloud Storage's or S3's")] = ""
    jwks: Annotated[str, about("gcp: address of the keys that verify identity tokens; unset: Google's")] = ""
    issuer: Annotated[str, about("gcp: issuer of identity tokens; unset: Google's")] = ""
    function: Annotated[str, about("gcp: address of the function; unset: the usual one under cloudfunctions.net")] = ""


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of one stack. ``stack`` comes from Pulumi, ``project`` from `gcp:project`.

    :func:`infra.settings.read.parse` fills in zones, images, disk types, placement and endpoints that the file omits.
    """

    stack: Annotated[str, _from("Pulumi")]
    project: Annotated[str, _from("`gcp:project`")]
    cloud: Annotated[Literal["gcp", "aws"], about("cloud of the stack")]
    region: Annotated[
        str,
        offers(
            "region of the whole stack; with `regions`, leave it out",
            [*GCP_ZONES, *(AWS_ZONES.keys() - AWS_WITHOUT_URLS)],
        ),
    ]
    image: Annotated[
        str, about("one pinned image: projects/<project>/global/images/<name>, ami-... or resolve:ssm:<name>:<version>")
    ]
    pools: Annotated[tuple[Pool, ...], Meta(min_length=1, max_length=500, description="pools of machines")]
    account: Annotated[str, about("aws: account id, in quotes")] = ""
    regions: Annotated[
        tuple[str, ...], about("several regions, in place of `region`; function and bucket are in the first")
    ] = ()
    home: Annotated[str, about("home region, one of `regions`; unset: the first. Changing it moves the home")] = ""
    images: Annotated[dict[str, str], about("aws: `image` in each other region of `regions`, by region")] = {}
    zones: Annotated[tuple[str, ...], about("zones for machines; unset: all zones of the regions")] = ()
    network: Network = Network()
    bucket: Bucket = Bucket()
    limits: Limits = Limits()
    fallback: Fallback = Fallback()
    reconcile: Reconcile = Reconcile()
    agent: Agent = Agent()
    alerts: Alerts = Alerts()
    budget: Budget | None = None
    channels: Annotated[tuple[Channel, ...], Meta(max_length=50, description="where jobs' events are announced")] = ()
    teams: Annotated[dict[str, Team], about("teams by name, among which the machines are shared")] = {}
    endpoints: Endpoints = Endpoints()
    kms_key: Annotated[str, about("aws: ARN of the KMS key for all disks; unset: the account's default key")] = ""
    kms_keys: Annotated[dict[str, str], about("aws: with `kms_key`: the key in each other region, by region")] = {}
    job_identity: Annotated[
        str, about("cloud identity of jobs: a service account's email or a role's ARN; unset: none")
    ] = ""
    submitters: Annotated[
        tuple[str, ...], about("users who may only submit and control jobs, written as in `reconcile.invokers`")
    ] = ()
    ssh: Annotated[
        tuple[str, ...],
        about("users who may open shells on machines, without root, written as in `reconcile.invokers`; unset: nobody"),
    ] = ()
    secrets: Annotated[
        tuple[str, ...], about("names of secrets in the cloud's secret manager for jobs to read; needs `job_identity`")
    ] = ()
    service_linked_role: Annotated[
        bool, about("aws: create the account's service-linked role for spot; set it in one stack per account")
    ] = False
    jobs: Annotated[tuple[str, ...], about("job files that `pulumi up` submits, relative to Pulumi.yaml")] = ()
    cancel_removed_jobs: Annotated[
        bool, about("cancel a job and delete its disks when its file is removed from `jobs`; unset: the job continues")
    ] = False
    labels: Annotated[dict[str, str], about("labels (tags) of every resource that supports them")] = {}
    allow_data_loss: Annotated[
        bool, about("lets a stack named prod* delete data on destroy and replace static machines' disks")
    ] = False

    def home_region(self) -> str:
        """Return the region with function and schedule. The bucket stays in ``region``, the first of `regions`."""
        return self.home or self.region

    def regions_of(self, pool: Pool) -> tuple[str, ...]:
        """Return the regions with zones of a pool, in the stack file's order."""
        found = {region_of(zone) for zone in pool.zones}
        return tuple(region for region in self.regions if region in found)

    def image_in(self, region: str, pool: Pool) -> str:
        return pool.image if region == self.region else pool.images[region]

    def kms_key_in(self, region: str) -> str:
        """Return the KMS key of a region's disks; "": the account's default key."""
        return self.kms_key if region == self.region else self.kms_keys.get(region, "")

    def owner(self) -> str:
        """Return the project id (Google Cloud) or account number (AWS) that pays for the stack."""
        return self.project if self.cloud == "gcp" else self.account

    def bucket_name(self) -> str:
        return self.bucket.name or f"sk-{self.owner()}-{self.stack}"

    def bucket_regions(self) -> tuple[str, ...]:
        """Return those of several regions that the bucket is in: machines there pay no egress for its objects."""
        location = (self.bucket.location or "").lower()
        found = GCP_DUAL_REGIONS.get(location, (location,))
        return tuple(region for region in self.regions if region in found) or self.regions[:1]

    def boot_deadline_s(self) -> int:
        """Return how long a requested machine may take until its hello, in real seconds."""
        slow = any(pool.machine.boots_slowly() for pool in self.pools)
        return self.limits.boot_deadline_s or (SLOW_BOOT_S if slow else BOOT_S)

    def callers(self) -> dict[str, str]:
        """Return the principals that may call the function, by their path in the stack file."""
        return _by_place({"reconcile.invokers": self.reconcile.invokers, "submitters": self.submitters})

    def people(self) -> dict[str, str]:
        """Return all principals that may call the function or open shells, by their path in the stack file."""
        return self.callers() | _by_place({"ssh": self.ssh})

    def addresses(self) -> str:
        """Return the notification channels' addresses as a JSON object by channel name; "" without channels."""
        found = {each.name: each.address for each in self.channels}
        return msgspec.json.encode(found).decode() if found else ""

    def dynamic(self) -> tuple[Pool, ...]:
        return tuple(pool for pool in self.pools if pool.kind == "spot")

    def static(self) -> tuple[Pool, ...]:
        return tuple(pool for pool in self.pools if pool.kind == "static")

    def most_machines(self) -> int:
        """Return how many machines the stack allows at once, static ones included."""
        dynamic = sum(pool.size for pool in self.dynamic())
        return sum(pool.size for pool in self.static()) + min(dynamic, self.limits.machines or dynamic)

    def team_states(self) -> tuple[TeamState, ...]:
        """Return the teams as the function reads them, in the order of the stack file."""
        return tuple(
            TeamState(
                name=name,
                members=team.members,
                share=team.share,
                max_machines=team.max_machines,
                max_usd_hour=team.max_usd_per_hour,
                max_usd_month=team.max_usd_per_month,
                high=team.high,
            )
            for name, team in self.teams.items()
        )


def _by_place(named: Mapping[str, Sequence[str]]) -> dict[str, str]:
    return {join(path, index): who for path, every in named.items() for index, who in enumerate(every)}


# --- stack/pools.json -------------------------------------------------------------------


def models(pool: Pool) -> tuple[str, ...]:
    """Return the provisioning models for which a spot pool has a machine template.

    Reserved capacity is used by on-demand machines.
    """
    return ("spot", "on-demand") if pool.on_demand_machines() or pool.reservations else ("spot",)


def pool_state(
    settings: Settings,
    pool: Pool,
    templates: Mapping[str, str] | None = None,
    placement: Mapping[str, str] | None = None,
) -> PoolState:
    """Return a pool as reconcile reads it.

    ``templates``: ``template_key`` -> machine template; ``placement``: zone -> placement policy or group.
    """
    machines = (
        StaticMachine(naming.static_machine(settings.stack, pool.name, index), pool.machine_zone(index))
        for index in range(pool.size if pool.kind == "static" else 0)
    )
    return PoolState(
        name=pool.name,
        kind=pool.kind,
        machine_type=pool.machine.type,
        zones=pool.zones,
        nproc=pool.machine.processes(),
        max_machines=pool.size,
        max_on_demand=pool.on_demand_machines(),
        disk_gb=pool.disk.size_gb,
        disk_type=pool.disk.type,
        disk_iops=pool.disk.iops,
        disk_mbps=pool.disk.mb_s,
        prices={zone: price for zone in pool.zones if (price := pool.price(zone))},
        templates=dict(templates or {}),
        placement=dict(placement or {}),
        machines=tuple(machines),
        disk_key=settings.kms_key,
        disk_usd_gb_month=DISK_PRICES.get(pool.disk.type),
        reservations=tuple(one.state() for one in pool.reservations),
    )


def stack_state(settings: Settings, pools: tuple[PoolState, ...]) -> StackState:
    """Return the stack as the function reads it, but without function URL, bundle hash and the machines' identity."""
    return StackState(
        stack=settings.stack,
        cloud=settings.cloud,
        project=settings.owner(),
        region=settings.home_region(),
        bucket=settings.bucket_name(),
        pools=pools,
        lease_minutes=settings.limits.lease_minutes,
        boot_deadline_s=settings.boot_deadline_s(),
        fallback=settings.fallback.state(),
        max_run_s=settings.limits.max_run_s(),
        job_identity=settings.job_identity,
        max_machines=settings.limits.machines,
        max_usd_hour=settings.limits.usd_per_hour,
        tick_minutes=settings.reconcile.tick_minutes,
        ssh=bool(settings.ssh),
        channels=tuple(ChannelState(each.name, each.kind, each.events) for each in settings.channels),
        teams=settings.team_states(),
        regions=settings.regions if len(settings.regions) > 1 else (),
        warm_usd=settings.limits.warm_copies_usd,
        egress=egress(settings.regions) if len(settings.regions) > 1 else {},
        bucket_regions=settings.bucket_regions() if len(settings.regions) > 1 else (),
    )


def state_text(settings: Settings, pools: Sequence[PoolState], url: str, node_identity: str, bundle_sha256: str) -> str:
    """Return the text of ``stack/pools.json``; ``url`` is the function's address, to which agents report."""
    known = stack_state(settings, tuple(pools))
    state = replace(known, function_url=url, node_identity=node_identity, bundle_sha256=bundle_sha256)
    return msgspec.json.format(msgspec.json.encode(state)).decode()
