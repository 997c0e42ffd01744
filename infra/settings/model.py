"""The stack file, typed: everything `Pulumi.<stack>.yaml` may say under `spotkeeper:`. Says types and ranges only.

What fields mean together is in ``checks``, ``gcp`` and ``aws`` beside this file. The
descriptions are what editors show, and the table of fields in `docs/operate.md`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct
from spotkeeper.spec.stack import Fallback as FallbackState

from infra.catalog import AWS_ZONES, GCP_ZONES
from infra.settings.pool import Hours, OnDestroy, Pool, about, offers

Alarm = Literal["ticks", "holds", "spend", "orphans"]
ALARMS: tuple[Alarm, ...] = ("ticks", "holds", "spend", "orphans")
OWN_RANGE = "10.40.0.0/16"


def _from(where: str) -> Meta:
    """A field that nobody writes into a stack file: messages and editors do not offer it."""
    return Meta(description=f"from {where}", extra={"offered": False})


class Network(Struct, frozen=True, forbid_unknown_fields=True):
    """One of the stack's own, made from ``cidr``; or one that exists: ``vpc`` with ``subnets``, or ``from_stack``."""

    cidr: Annotated[str, about(f"addresses of a network of its own; unset: {OWN_RANGE}")] = ""
    vpc: Annotated[str, about("an existing one: projects/<project>/global/networks/<name>, or vpc-...")] = ""
    subnets: Annotated[
        dict[str, str], about("its subnets: gcp: region to projects/.../subnetworks/<name>; aws: zone to subnet-...")
    ] = {}
    from_stack: Annotated[
        str, about("organization/<project>/<stack>: another Pulumi stack whose outputs are `vpc` and `subnets`")
    ] = ""
    public_ip: Annotated[bool, about("only for jobs that read from outside the cloud")] = False
    ssh: Annotated[Literal["none", "iap"], about("gcp: iap: logins through the Identity-Aware Proxy, by OS Login")] = (
        "none"
    )

    def exists(self) -> bool:
        """Whether somebody else made it, and keeps it."""
        return bool(self.vpc or self.subnets or self.from_stack)


class Bucket(Struct, frozen=True, forbid_unknown_fields=True):
    """All that the stack knows, with its jobs' checkpoints and outputs."""

    name: Annotated[str | None, about("unset: sk-<project or account>-<stack>")] = None
    location: Annotated[str | None, about("gcp: unset: the stack's region")] = None
    on_destroy: Annotated[OnDestroy, about("what a destroy does to it, with its checkpoints and outputs")] = "delete"


class Limits(Struct, frozen=True, forbid_unknown_fields=True):
    """Fuses: what ends even when nobody is looking."""

    lease_minutes: Annotated[
        int, Meta(ge=1, le=1440, description="the function out of reach for so long: machines power off")
    ] = 120
    boot_deadline_s: Annotated[
        int, Meta(ge=30, le=3600, description="a machine says hello by then, or is replaced")
    ] = 480
    max_run_hours: Annotated[Hours | None, about("gcp: of every pool that does not say otherwise")] = None
    machines: (
        Annotated[int, Meta(ge=1, le=100_000, description="dynamic machines of all pools together; unset: their sizes")]
        | None
    ) = None
    usd_per_hour: (
        Annotated[float, Meta(gt=0, description="what dynamic machines may cost together, by list price")] | None
    ) = None

    def max_run_s(self) -> int | None:
        return None if self.max_run_hours is None else int(self.max_run_hours * 3600)


class Fallback(Struct, frozen=True, forbid_unknown_fields=True):
    """When jobs go on-demand for a while, and for how long: on-demand is a bout, not a verdict."""

    losses: Annotated[int, Meta(ge=1, le=1000, description="beyond one a rank, within the window")] = 3
    window_minutes: Annotated[float, Meta(gt=0, le=10080, description="in which losses count")] = 60
    short_life_minutes: Annotated[
        float, Meta(ge=0, le=1440, description="a life shorter than that was not worth its restart")
    ] = 10
    short_lives: Annotated[int, Meta(ge=1, le=100, description="so many of them in a row")] = 3
    bout_minutes: Annotated[float, Meta(gt=0, le=10080, description="then spot is tried again")] = 30

    def state(self) -> FallbackState:
        """As the function reads it, in seconds."""
        return FallbackState(
            losses=self.losses,
            window_s=60 * self.window_minutes,
            short_life_s=60 * self.short_life_minutes,
            short_lives=self.short_lives,
            bout_s=60 * self.bout_minutes,
        )


class Reconcile(Struct, frozen=True, forbid_unknown_fields=True):
    """The function and its schedule."""

    tick_minutes: Annotated[
        int, Meta(ge=1, le=60, description="from one tick to the next; schedules know no seconds")
    ] = 1
    memory_mb: Annotated[int, Meta(ge=256, le=4096, description="of the function")] = 512
    timeout_s: Annotated[int, Meta(ge=60, le=3600, description="a request works for most of 60 s")] = 120
    runtime: Annotated[Literal["python311", "python312", "python313"], about("the function's Python")] = "python311"
    invokers: Annotated[
        tuple[str, ...], about("who else may tick and poke: user:kim@acme.dev, serviceAccount:...; aws: ARNs")
    ] = ()


class Agent(Struct, frozen=True, forbid_unknown_fields=True):
    """What machines run."""

    interpreter: Annotated[str, about("a command or a path on the image")] = "python3"
    python: Annotated[
        Literal["3.10", "3.11", "3.12", "3.13"], about("the interpreter's version: decides the wheels in the bundle")
    ] = "3.11"
    arch: Annotated[Literal["x86_64", "aarch64"], about("the machines', as `uname -m` says")] = "x86_64"


class Budget(Struct, frozen=True, forbid_unknown_fields=True):
    """Opt-in; on Google Cloud it needs rights on the billing account."""

    monthly: Annotated[int, Meta(ge=1, description="what the stack may cost a month")]
    billing_account: Annotated[str, about("gcp: 0123AB-4567CD-89EF01")] = ""
    currency: Annotated[str, about("the billing account's")] = "USD"
    alert_at: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=500)], ...], about("percent of it at which a mail is sent")
    ] = (50, 90, 100)


class Alerts(Struct, frozen=True, forbid_unknown_fields=True):
    """Mails, to whoever runs the stack."""

    email: Annotated[str, about("unset: nobody is told")] = ""
    missed_minutes: Annotated[int, Meta(ge=2, le=1410, description="without any tick")] = 5
    about: Annotated[
        tuple[Alarm, ...], about("ticks that are missed, jobs that hold, spending, machines without a job")
    ] = ALARMS


class Endpoints(Struct, frozen=True, forbid_unknown_fields=True):
    """Where the cloud answers; other values than the cloud's own are for a cloud on one machine only."""

    compute: Annotated[str, about("unset: Compute Engine's, EC2's")] = ""
    storage: Annotated[str, about("unset: Cloud Storage's, S3's")] = ""
    jwks: Annotated[str, about("gcp: keys of identity tokens; unset: Google's")] = ""
    issuer: Annotated[str, about("gcp: of identity tokens; unset: Google's")] = ""
    function: Annotated[str, about("gcp: unset: its well-known name under cloudfunctions.net")] = ""


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """One stack. ``stack`` and ``project`` come from Pulumi and from `gcp:project`.

    Whoever has one from :func:`infra.settings.parse` finds zones, images, disk types, placement and
    endpoints filled in: no reader has to think of what was left out.
    """

    stack: Annotated[str, _from("Pulumi")]
    project: Annotated[str, _from("`gcp:project`")]
    cloud: Annotated[Literal["gcp", "aws"], about("whose it is")]
    region: Annotated[str, offers("all of it is in one region", [*GCP_ZONES, *AWS_ZONES])]
    image: Annotated[
        str, about("one pinned image: projects/<project>/global/images/<name>; ami-..., resolve:ssm:<name>:<version>")
    ]
    pools: Annotated[tuple[Pool, ...], Meta(min_length=1, max_length=500, description="machine shapes, and how many")]
    account: Annotated[str, about("aws: the account's number, in quotes")] = ""
    zones: Annotated[tuple[str, ...], about("where machines may be; unset: all of the region")] = ()
    network: Network = Network()
    bucket: Bucket = Bucket()
    limits: Limits = Limits()
    fallback: Fallback = Fallback()
    reconcile: Reconcile = Reconcile()
    agent: Agent = Agent()
    alerts: Alerts = Alerts()
    budget: Budget | None = None
    endpoints: Endpoints = Endpoints()
    job_identity: Annotated[
        str, about("whom jobs are: a service account's address, a role's ARN; unset: they are nobody")
    ] = ""
    secrets: Annotated[
        tuple[str, ...], about("secrets of the cloud's own store that jobs may read, by name; needs job_identity")
    ] = ()
    service_linked_role: Annotated[
        bool, about("aws: make the account's role for spot machines; once in an account, by one stack")
    ] = False
    jobs: Annotated[tuple[str, ...], about("job files, from the folder of Pulumi.yaml, that `pulumi up` submits")] = ()
    cancel_removed_jobs: Annotated[
        bool, about("a job whose file leaves `jobs` is cancelled, with its disks; unset: it goes on")
    ] = False
    labels: Annotated[dict[str, str], about("on everything that can carry them")] = {}
    allow_data_loss: Annotated[
        bool, about("lets a stack called prod* delete data on destroy, and static nodes' disks be replaced")
    ] = False

    def owner(self) -> str:
        """The project or account that pays."""
        return self.project if self.cloud == "gcp" else self.account

    def bucket_name(self) -> str:
        return self.bucket.name or f"sk-{self.owner()}-{self.stack}"

    def dynamic(self) -> tuple[Pool, ...]:
        return tuple(pool for pool in self.pools if pool.kind == "spot")

    def static(self) -> tuple[Pool, ...]:
        return tuple(pool for pool in self.pools if pool.kind == "static")
