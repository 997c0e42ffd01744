"""The stack file, typed: everything `Pulumi.<stack>.yaml` may say under `spotkeeper:`.

A provider finds most mistakes in the middle of an `up`, and some never (a wrong zone,
spot with a restart, a disk of -5 GB). So every rule that can be known offline is
checked here, all at once, before anything is declared; each message names the path, the
value and the nearest valid name. Nothing here may call a cloud or read the environment.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct
from spotkeeper.spec.names import POOL_NAME, STACK_NAME
from spotkeeper.spec.parse import Problem, SpecError, convert, join, nearest, problem, problems_of
from spotkeeper.spec.stack import Fallback as FallbackState
from spotkeeper.spec.stack import Price

from infra import naming
from infra.catalog import GCP_ACCELERATOR_PRICES, GCP_BUILT_IN, GCP_PRICES, GCP_ZONES, list_price, zones_of

NAMESPACE = "spotkeeper"
OnDestroy = Literal["delete", "keep", "protect"]
"""What `pulumi destroy` does to data: delete it, leave it in the cloud, or refuse to run."""

GB = Annotated[int, Meta(ge=10, le=65_536)]  # 10 GB is the smallest Persistent Disk, 64 TB the largest
_IMAGE = re.compile(r"projects/[^/]+/global/images/[^/]+\Z")
_PROJECT = re.compile(r"[a-z][-a-z0-9]{4,28}[a-z0-9]\Z")
_LABEL_KEY = re.compile(r"[a-z][-_a-z0-9]{0,62}\Z")
_LABEL_VALUE = re.compile(r"[-_a-z0-9]{0,63}\Z")
_ACCOUNT = re.compile(r"[a-z][-a-z0-9]{4,28}[a-z0-9]@[a-z][-a-z0-9]{4,28}[a-z0-9]\.iam\.gserviceaccount\.com\Z")
_EMAIL = re.compile(r"[^@\s]+@[^@\s]+\.[^@\s]+\Z")
PRIVATE = tuple(map(ipaddress.IPv4Network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")))  # RFC 1918
LABELS = 56
_LEAST_TICKS_OF_LEASE = 3  # one lost tick, or two, must not power machines off


class Accelerator(Struct, frozen=True, forbid_unknown_fields=True):
    """Accelerators added to a machine type that does not bring its own (N1)."""

    type: str
    count: Annotated[int, Meta(ge=1, le=16)] = 1


class Machine(Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    accelerator: Accelerator | None = None
    nproc: Annotated[int, Meta(ge=1, le=64)] | None = None  # processes per node; None: one per accelerator, or 1

    def processes(self) -> int:
        if self.nproc is not None:
            return self.nproc
        return self.accelerator.count if self.accelerator else GCP_BUILT_IN.get(self.type, ("", 1))[1]

    def has_accelerator(self) -> bool:
        return self.accelerator is not None or self.type in GCP_BUILT_IN


class BootDisk(Struct, frozen=True, forbid_unknown_fields=True):
    """Stateless: dies with its VM."""

    size_gb: GB = 50
    type: str = "pd-balanced"


class DataDisk(Struct, frozen=True, forbid_unknown_fields=True):
    """The retained disk of a rank (spot pool) or of a node (static pool)."""

    size_gb: GB
    type: str = "pd-balanced"
    on_destroy: OnDestroy = "delete"  # static pools only: a rank's disk goes with its stack


class Placement(Struct, frozen=True, forbid_unknown_fields=True):
    """Nodes of one zone close together, for the network's sake."""

    max_distance: Annotated[int, Meta(ge=1, le=3)] | None = None


class Pool(Struct, frozen=True, forbid_unknown_fields=True):
    """A machine shape in a set of zones."""

    name: str
    kind: Literal["spot", "static"]
    size: Annotated[int, Meta(ge=1, le=10_000)]  # static: how many nodes; spot: at most so many
    machine: Machine
    disk: DataDisk
    zones: tuple[str, ...] = ()  # in the order to try first; () means every zone of the stack
    boot_disk: BootDisk = BootDisk()
    placement: Placement | None = None
    max_on_demand: Annotated[int, Meta(ge=0, le=10_000)] | None = None  # of `size`; None: all of them
    notice_s: Annotated[int, Meta(ge=0, le=120)] | None = None  # None: 120 for spot
    prices: dict[str, Price] = {}  # by zone; the rest comes from the table in catalog.py

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
        return 120 if self.notice_s is None else self.notice_s

    def node_zone(self, index: int) -> str:
        """Where static node ``index`` lives: the zones in turn."""
        return self.zones[index % len(self.zones)]


class Network(Struct, frozen=True, forbid_unknown_fields=True):
    cidr: str = "10.40.0.0/16"
    public_ip: bool = False  # needed only by jobs that read from outside the cloud
    ssh: Literal["none", "iap"] = "none"  # iap: people log in through Google's Identity-Aware Proxy, by OS Login


class Bucket(Struct, frozen=True, forbid_unknown_fields=True):
    name: str | None = None  # None: sk-<project>-<stack>
    location: str | None = None  # None: the stack's region
    on_destroy: OnDestroy = "delete"


class Limits(Struct, frozen=True, forbid_unknown_fields=True):
    """Fuses: what ends even when nobody is looking."""

    lease_minutes: Annotated[int, Meta(ge=1, le=1440)] = 120  # function out of reach so long: machines power off
    boot_deadline_s: Annotated[int, Meta(ge=30, le=3600)] = 480
    max_run_hours: Annotated[float, Meta(gt=0, le=2880)] | None = None  # of a dynamic VM; the cloud enforces it

    def max_run_s(self) -> int | None:
        return None if self.max_run_hours is None else int(self.max_run_hours * 3600)


class Fallback(Struct, frozen=True, forbid_unknown_fields=True):
    """When jobs go on-demand for a while, and for how long: on-demand is a bout, not a verdict."""

    losses: Annotated[int, Meta(ge=1, le=1000)] = 3  # beyond one per rank, within the window
    window_minutes: Annotated[float, Meta(gt=0, le=10080)] = 60
    short_life_minutes: Annotated[float, Meta(ge=0, le=1440)] = 10  # shorter was not worth the restart
    short_lives: Annotated[int, Meta(ge=1, le=100)] = 3  # in a row
    bout_minutes: Annotated[float, Meta(gt=0, le=10080)] = 30  # then spot is tried again

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

    tick_minutes: Annotated[int, Meta(ge=1, le=60)] = 1  # Cloud Scheduler knows no seconds
    memory_mb: Annotated[int, Meta(ge=256, le=4096)] = 512
    timeout_s: Annotated[int, Meta(ge=60, le=3600)] = 120  # a request works for most of 60 (reconcile/deadline.py)
    runtime: Literal["python311", "python312", "python313"] = "python311"
    invokers: tuple[str, ...] = ()  # who may tick and poke besides the schedule: `user:a@b.c`, `serviceAccount:...`


class Agent(Struct, frozen=True, forbid_unknown_fields=True):
    """What VMs run."""

    interpreter: str = "python3"  # a command or a path on the image
    python: Literal["3.10", "3.11", "3.12", "3.13"] = "3.11"  # its version: decides the wheels in the bundle
    arch: Literal["x86_64", "aarch64"] = "x86_64"  # the machines', as `uname -m` says: the same


class Budget(Struct, frozen=True, forbid_unknown_fields=True):
    """Opt-in: needs rights on the billing account."""

    monthly: Annotated[int, Meta(ge=1)]
    billing_account: str
    currency: str = "USD"
    alert_at: tuple[Annotated[int, Meta(ge=1, le=500)], ...] = (50, 90, 100)  # percent


class Alerts(Struct, frozen=True, forbid_unknown_fields=True):
    email: str = ""  # "": nobody is told
    missed_minutes: Annotated[int, Meta(ge=2, le=1410)] = 5  # without any tick


class Endpoints(Struct, frozen=True, forbid_unknown_fields=True):
    """Where the cloud answers; another value than Google's only for a cloud on one machine."""

    compute: str = "https://compute.googleapis.com/compute/v1"
    storage: str = "https://storage.googleapis.com"
    jwks: str = ""  # "": Google's
    issuer: str = ""  # "": Google's
    function: str = ""  # "": the function's well-known name under cloudfunctions.net


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """One stack. ``stack`` and ``project`` come from Pulumi and from `gcp:project`."""

    stack: str
    project: str
    cloud: Literal["gcp"]
    region: str
    image: str  # pinned: a family would replace templates whenever an image is published
    pools: Annotated[tuple[Pool, ...], Meta(min_length=1, max_length=50)]
    zones: tuple[str, ...] = ()  # () means all of the region
    network: Network = Network()
    bucket: Bucket = Bucket()
    limits: Limits = Limits()
    fallback: Fallback = Fallback()
    reconcile: Reconcile = Reconcile()
    agent: Agent = Agent()
    alerts: Alerts = Alerts()
    budget: Budget | None = None
    endpoints: Endpoints = Endpoints()
    job_identity: str = ""  # a service account: whom jobs are; "": they are nobody
    labels: dict[str, str] = {}  # on everything that can carry them
    allow_data_loss: bool = False  # lets a stack called prod* delete data on destroy

    def bucket_name(self) -> str:
        return self.bucket.name or f"sk-{self.project}-{self.stack}"


# --- reading --------------------------------------------------------------------------


def from_config(config: Mapping[str, str], stack: str) -> Settings:
    """Pulumi's flat configuration (``spotkeeper:pools`` -> text or JSON) as settings.

    Raises:
        SpecError: everything that is wrong with it.
    """
    plain: dict[str, object] = {}
    wrong: list[Problem] = []
    for name, text in config.items():
        namespace, _, key = name.partition(":")
        if namespace == NAMESPACE:
            plain[key] = _value(key, text)
        elif nearest(namespace, (NAMESPACE,)):
            wrong.append(Problem(name, "unknown key", hint=f"{NAMESPACE}:{key}"))
    if wrong:  # nobody would read them: a limit of a misspelt namespace would be none
        raise SpecError(wrong)
    return parse(plain, stack=stack, project=config.get("gcp:project", ""))


def _value(key: str, text: str) -> object:
    """Pulumi hands over texts as they are and everything else as JSON."""
    if key in ("cloud", "region", "image", "job_identity"):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def parse(plain: Mapping[str, object], *, stack: str, project: str) -> Settings:
    """Plain values (the keys of the stack file) as checked, completed settings.

    Raises:
        SpecError: unknown keys, wrong types, and combinations that cannot work.
    """
    fixed = {"stack": None, "project": "gcp:project"}
    problems = [Problem(key, "is not set here", hint=hint) for key, hint in fixed.items() if key in plain]
    if problems:
        raise SpecError(problems)
    given = {key: value for key, value in plain.items() if not (key == "budget" and value == {})}
    document: dict[str, object] = {**given, "stack": stack, "project": project}
    problems = problems_of(document, Settings)
    settings, places, unknown = _well(document, problems)
    if settings is None:
        raise SpecError(problems)
    told = [found for rule in RULES for found in rule(settings)]
    for place, pool in zip(places, settings.pools, strict=True):
        where = join("pools", place)
        for pool_rule in POOL_RULES:
            told += [Problem(f"{where}.{p.path}", p.message, p.value, p.hint) for p in pool_rule(pool, settings)]
    problems += [found for found in told if _head(found.path) not in unknown]
    if problems:
        raise SpecError(problems)
    return settings


def _well(document: dict[str, object], problems: list[Problem]) -> tuple[Settings | None, list[int], set[str]]:
    """(the settings without what is of a wrong type, the places of their pools, the keys of which nothing is known).

    So a field of a wrong type hides no combination that cannot work. None: too little of them is left.
    """
    wrong = {found.path for found in problems}
    unknown = {_head(path) for path in wrong if not path.startswith("pools[")}
    unknown |= {found.hint for found in problems if found.path in document and found.hint}  # a key spelt wrong
    pools = document.get("pools")
    each = list(enumerate(pools)) if isinstance(pools, list | tuple) else []
    well = [(at, pool) for at, pool in each if not any(_head(path, 2) == join("pools", at) for path in wrong)]
    stand_in = {"cloud": "gcp", "region": "", "image": ""}
    known = {key: value for key, value in document.items() if key not in unknown}
    try:
        settings = convert({**stand_in, **known, "pools": [pool for _, pool in well]}, Settings)
    except SpecError:
        if not problems:
            raise
        return None, [], unknown
    return _complete(settings), [at for at, _ in well], unknown


def _head(path: str, parts: int = 1) -> str:
    """The first parts of a path: ``limits``, ``pools``; with two of them, ``pools[1]``."""
    return "".join(re.findall(r"\[?[^.\[]+", path)[:parts])


def _complete(settings: Settings) -> Settings:
    """Zones that were left out, filled in, so that no reader has to think of it."""
    zones = settings.zones or zones_of(settings.region)
    pools = tuple(pool if pool.zones else msgspec.structs.replace(pool, zones=zones) for pool in settings.pools)
    return msgspec.structs.replace(settings, zones=zones, pools=pools)


# --- rules for the whole stack ---------------------------------------------------------


def stack_name(s: Settings) -> Iterator[Problem]:
    if not STACK_NAME.match(s.stack):
        yield problem("stack", "want a letter, then letters, digits and -, at most 24, all lower case", s.stack)


def project_id(s: Settings) -> Iterator[Problem]:
    if not s.project:
        yield Problem("gcp:project", "missing, want the project's id")
    elif not _PROJECT.match(s.project) and s.endpoints == Endpoints():  # a cloud on one machine has no such rule
        yield problem("gcp:project", "is no project id (6 to 30 lower-case letters, digits and -)", s.project)


def region_and_zones(s: Settings) -> Iterator[Problem]:
    if s.region not in GCP_ZONES:
        yield problem("region", "is not a region in infra/catalog.py", s.region, nearest(s.region, GCP_ZONES))
        return
    for index, zone in enumerate(s.zones):
        yield from _zone(join("zones", index), zone, s.zones[:index], zones_of(s.region), f"a zone of {s.region}")


def _zone(path: str, zone: str, before: tuple[str, ...], known: tuple[str, ...], what: str) -> Iterator[Problem]:
    if zone in before:
        yield problem(path, "is named twice", zone)
    elif zone not in known:
        yield Problem(path, f"{zone} is not {what}", hint=nearest(zone, known))


def image_pinned(s: Settings) -> Iterator[Problem]:
    if "/family/" in s.image:
        yield problem("image", "names a family, which moves: name one image", s.image)
    elif not _IMAGE.match(s.image):
        yield problem("image", "want projects/<project>/global/images/<name>", s.image)


def pool_names(s: Settings) -> Iterator[Problem]:
    for index, pool in enumerate(s.pools):
        path = join(join("pools", index), "name")
        if not POOL_NAME.match(pool.name):
            yield problem(path, "want a letter, then letters, digits and -, at most 24, all lower case", pool.name)
        elif pool.name in [other.name for other in s.pools[:index]]:
            yield problem(path, "another pool has this name", pool.name)


def network_range(s: Settings) -> Iterator[Problem]:
    try:
        network = ipaddress.ip_network(s.network.cidr)
    except ValueError as error:
        yield problem("network.cidr", f"is no address range: {error}", s.network.cidr)
        return
    if not isinstance(network, ipaddress.IPv4Network) or not any(network.subnet_of(each) for each in PRIVATE):
        yield problem(
            "network.cidr", f"want a private IPv4 range, within one of {', '.join(map(str, PRIVATE))}", s.network.cidr
        )
    elif network.num_addresses - 4 < sum(pool.size for pool in s.pools):  # Compute Engine keeps 4 of them
        nodes = sum(pool.size for pool in s.pools)
        yield problem("network.cidr", f"has too few addresses for {nodes} nodes", s.network.cidr)


def lease_spans_ticks(s: Settings) -> Iterator[Problem]:
    least = _LEAST_TICKS_OF_LEASE * s.reconcile.tick_minutes
    if s.limits.lease_minutes < least:
        yield problem(
            "limits.lease_minutes",
            f"is below {least}: {_LEAST_TICKS_OF_LEASE} ticks (reconcile.tick_minutes) must fit",
            s.limits.lease_minutes,
        )
    if s.limits.max_run_hours is not None and s.limits.max_run_hours * 3600 < 2 * s.limits.boot_deadline_s:
        yield problem("limits.max_run_hours", "is less than two boot deadlines", s.limits.max_run_hours)


def function_timeout(s: Settings) -> Iterator[Problem]:
    """A tick must end before the next one begins, or rounds only wait for each other's lease."""
    if s.reconcile.timeout_s > 60 * s.reconcile.tick_minutes * 5:
        yield problem("reconcile.timeout_s", "is longer than five ticks", s.reconcile.timeout_s)


def people(s: Settings) -> Iterator[Problem]:
    kinds = ("user", "serviceAccount")
    for index, member in enumerate(s.reconcile.invokers):
        path = join("reconcile.invokers", index)
        kind, _, address = member.partition(":")
        if kind in ("group", "domain"):
            yield problem(path, f"a token does not tell its caller's {kind}: name each user or service account", member)
        elif kind not in kinds:
            yield problem(path, f"want <kind>:<address>, kind one of {', '.join(kinds)}", member, nearest(kind, kinds))
        elif not _EMAIL.match(address):
            yield problem(path, "has no e-mail address behind the colon", member)
    if s.alerts.email and not _EMAIL.match(s.alerts.email):
        yield problem("alerts.email", "is no e-mail address", s.alerts.email)


def job_identity(s: Settings) -> Iterator[Problem]:
    """A machine is not itself to its jobs: whoever could be it could power off the others."""
    if s.job_identity and not _ACCOUNT.match(s.job_identity):
        yield problem("job_identity", "want <name>@<project>.iam.gserviceaccount.com", s.job_identity)
    elif s.job_identity.partition("@")[0] in {naming.account(s.stack, key) for key in ("vm", "fn", "ck", "bd")}:
        yield problem("job_identity", "is an account of Spotkeeper's own: make one for jobs", s.job_identity)


def label_rules(s: Settings) -> Iterator[Problem]:
    if len(s.labels) > LABELS:
        message = f"are {len(s.labels)}: a resource has 64 labels at most, and 8 of them are kept for Spotkeeper's own"
        yield Problem("labels", message)
    for key, value in s.labels.items():
        path = join("labels", key)
        if key.startswith("sk-"):
            yield problem(path, "sk-... labels are Spotkeeper's own", value)
        elif not _LABEL_KEY.match(key):
            yield Problem(path, "a label's key is lower-case letters, digits, - and _, at most 63")
        elif not _LABEL_VALUE.match(value):
            yield problem(path, "a label's value is lower-case letters, digits, - and _, at most 63", value)


def bucket_name(s: Settings) -> Iterator[Problem]:
    name = s.bucket_name()
    if not re.fullmatch(r"[a-z0-9][-_a-z0-9]{1,61}[a-z0-9]", name) or name.startswith("goog") or "google" in name:
        yield problem("bucket.name", "is no bucket name (3 to 63 lower-case letters, digits, - and _)", name)


def production_data(s: Settings) -> Iterator[Problem]:
    if not s.stack.startswith("prod") or s.allow_data_loss:
        return
    message = f"a destroy of {s.stack} would lose data: keep or protect it, or set allow_data_loss: true"
    if s.bucket.on_destroy == "delete":
        yield problem("bucket.on_destroy", message, "delete")
    for index, pool in enumerate(s.pools):
        if pool.kind == "static" and pool.disk.on_destroy == "delete":
            yield problem(f"pools[{index}].disk.on_destroy", message, "delete")


def addresses(s: Settings) -> Iterator[Problem]:
    for name in ("compute", "storage", "jwks", "issuer", "function"):
        value = getattr(s.endpoints, name)
        if value and not re.match(r"https?://[^/\s]+", value):
            yield problem(join("endpoints", name), "want an address, http(s)://...", value)


RULES = (
    stack_name, project_id, region_and_zones, image_pinned, pool_names, network_range, lease_spans_ticks,
    function_timeout, people, job_identity, label_rules, bucket_name, production_data, addresses,
)  # fmt: skip


# --- rules for one pool; paths are relative to it --------------------------------------


def pool_zones(pool: Pool, s: Settings) -> Iterator[Problem]:
    in_region = zones_of(s.region)
    if not in_region:
        return  # the region is wrong, which is said elsewhere
    for index, zone in enumerate(pool.zones):
        if zone not in in_region:
            yield Problem(join("zones", index), f"{zone} is not a zone of {s.region}", hint=nearest(zone, in_region))
        else:
            yield from _zone(join("zones", index), zone, pool.zones[:index], s.zones, "in the stack's zones")


def pool_machine(pool: Pool, s: Settings) -> Iterator[Problem]:
    machine = pool.machine
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)+", machine.type):
        yield problem("machine.type", "is no machine type", machine.type, nearest(machine.type, GCP_PRICES))
    if machine.accelerator is None:
        return
    if machine.type in GCP_BUILT_IN:
        name, count = GCP_BUILT_IN[machine.type]
        yield Problem("machine.accelerator", f"{machine.type} brings its own ({count} x {name}): leave it out")
    elif not machine.type.startswith("n1-"):
        yield problem("machine.accelerator", "only n1 machines take added accelerators", machine.type)
    elif machine.accelerator.type not in GCP_ACCELERATOR_PRICES and not pool.prices:
        hint = nearest(machine.accelerator.type, GCP_ACCELERATOR_PRICES)
        yield problem("machine.accelerator.type", "is not in infra/catalog.py", machine.accelerator.type, hint)


def pool_prices(pool: Pool, s: Settings) -> Iterator[Problem]:
    for zone in pool.prices:
        if zone not in pool.zones:
            yield Problem(join("prices", zone), "is not a zone of this pool", hint=nearest(zone, pool.zones))
    for zone in pool.zones:
        price = pool.price(zone)
        if price is None:
            hint = nearest(pool.machine.type, GCP_PRICES)
            message = f"{pool.machine.type} is not in infra/catalog.py: give its price"
            yield Problem(join("prices", zone), message, hint=hint)
        elif pool.kind == "spot" and price.spot is None:
            yield Problem(join(join("prices", zone), "spot"), "missing, a spot pool needs it")
        elif price.spot is not None and price.spot > price.on_demand:
            yield problem(join(join("prices", zone), "spot"), "is above the on-demand price", price.spot)


def pool_kind(pool: Pool, s: Settings) -> Iterator[Problem]:
    if pool.kind == "static":
        if pool.max_on_demand is not None:
            yield problem("max_on_demand", "only a spot pool has it: static nodes are on-demand", pool.max_on_demand)
        if pool.notice_s is not None:
            yield problem("notice_s", "only a spot pool has it: static nodes are not preempted", pool.notice_s)
        if len(pool.zones) > pool.size and pool.zones != s.zones:
            yield problem("zones", f"has more zones than the pool has nodes ({pool.size})", list(pool.zones))
        return
    if pool.disk.on_destroy != "delete":
        message = "only a static pool's disk can stay: the disks of ranks go with the stack"
        yield problem("disk.on_destroy", message, pool.disk.on_destroy)
    if pool.max_on_demand is not None and pool.max_on_demand > pool.size:
        yield problem("max_on_demand", f"is above size ({pool.size})", pool.max_on_demand)


def pool_disks(pool: Pool, s: Settings) -> Iterator[Problem]:
    kinds = ("pd-standard", "pd-balanced", "pd-ssd", "pd-extreme",
             "hyperdisk-balanced", "hyperdisk-extreme", "hyperdisk-throughput", "hyperdisk-ml")  # fmt: skip
    for path, kind in (("disk.type", pool.disk.type), ("boot_disk.type", pool.boot_disk.type)):
        if kind not in kinds:
            yield problem(path, "is no disk type", kind, nearest(kind, kinds))
    if pool.disk.type == "hyperdisk-ml":
        yield problem("disk.type", "is for reading many times, not for checkpoints", pool.disk.type)


POOL_RULES = (pool_zones, pool_machine, pool_prices, pool_kind, pool_disks)
