"""What Google Cloud asks of a stack file, and what it fills in. Rules as in ``checks``."""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec.structs import replace
from spotkeeper.spec.names import STACK_NAME
from spotkeeper.spec.parse import Problem, join, nearest, problem

from infra import naming
from infra.catalog import GCP_ACCELERATOR_PRICES, GCP_BUILT_IN, zones_of
from infra.settings.checks import EMAIL, PoolRule, Rule, only_elsewhere
from infra.settings.model import OWN_RANGE, Endpoints, Settings
from infra.settings.pool import SPOT_NOTICE_S, Pool

COMPUTE = "https://compute.googleapis.com/compute/v1"
STORAGE = "https://storage.googleapis.com"
DISK = "pd-balanced"
_IMAGE = re.compile(r"projects/[^/]+/global/images/[^/]+\Z")
_PROJECT = re.compile(r"[a-z][-a-z0-9]{4,28}[a-z0-9]\Z")
_ACCOUNT = re.compile(r"[a-z][-a-z0-9]{4,28}[a-z0-9]@[a-z][-a-z0-9]{4,28}[a-z0-9]\.iam\.gserviceaccount\.com\Z")
_NETWORK = re.compile(r"projects/[^/\s]+/global/networks/[^/\s]+\Z")
_SUBNETWORK = re.compile(r"projects/[^/\s]+/regions/([^/\s]+)/subnetworks/[^/\s]+\Z")
_SECRET = re.compile(r"(projects/[^/\s]+/secrets/)?[A-Za-z0-9_-]{1,255}\Z")
_BILLING = re.compile(r"[0-9A-F]{6}-[0-9A-F]{6}-[0-9A-F]{6}\Z")
_ARM = ("t2a-", "c4a-", "n4a-", "a4x-")

# Disk types -> the smallest in GB, and what of them is bought: operations, throughput.
_DISKS: dict[str, tuple[int, bool, bool]] = {
    "pd-standard": (10, False, False),
    "pd-balanced": (10, False, False),
    "pd-ssd": (10, False, False),
    "pd-extreme": (500, True, False),
    "hyperdisk-balanced": (10, True, True),
    "hyperdisk-extreme": (64, True, False),
    "hyperdisk-throughput": (2048, False, True),
    "hyperdisk-ml": (10, False, True),
}
# How a type's GPUs reach the network by themselves.
_GPU_DIRECT: dict[str, str] = {
    "a3-highgpu-8g": "tcpx",
    "a3-megagpu-8g": "tcpxo",
    "a3-ultragpu-8g": "rdma",
    "a4-highgpu-8g": "rdma",
}


def complete(s: Settings) -> Settings:
    """Zones, images, disk types, placement and addresses that were left out, filled in."""
    zones = s.zones or zones_of(s.region)
    found = s.endpoints
    return replace(
        s,
        zones=zones,
        pools=tuple(_pool(pool, replace(s, zones=zones)) for pool in s.pools),
        network=s.network if s.network.exists() or s.network.cidr else replace(s.network, cidr=OWN_RANGE),
        endpoints=replace(found, compute=found.compute or COMPUTE, storage=found.storage or STORAGE),
    )


def _pool(pool: Pool, s: Settings) -> Pool:
    near = pool.placement and replace(pool.placement, strategy=pool.placement.strategy or "compact")
    return replace(
        pool,
        zones=pool.zones or (() if pool.kind == "static" else s.zones),
        image=pool.image or s.image,
        placement=near,
        disk=replace(pool.disk, type=pool.disk.type or DISK),
        boot_disk=replace(pool.boot_disk, type=pool.boot_disk.type or DISK),
        max_run_hours=pool.max_run_hours
        if pool.max_run_hours is not None or pool.kind == "static"
        else s.limits.max_run_hours,
    )


def is_local(s: Settings) -> bool:
    """Whether this is a cloud on one machine, which has no rule for names of projects."""
    return s.endpoints not in (Endpoints(), Endpoints(compute=COMPUTE, storage=STORAGE))


def project_id(s: Settings) -> Iterator[Problem]:
    if not s.project:
        yield Problem("gcp:project", "missing, want the project's id")
    elif not _PROJECT.match(s.project) and not is_local(s):
        yield problem("gcp:project", "is no project id (6 to 30 lower-case letters, digits and -)", s.project)


def image(s: Settings) -> Iterator[Problem]:
    yield from _image("image", s.image)


def _image(path: str, name: str) -> Iterator[Problem]:
    if "/family/" in name:
        yield problem(path, "names a family, which moves: name one image", name)
    elif not _IMAGE.match(name):
        yield problem(path, "want projects/<project>/global/images/<name>", name)


def existing_network(s: Settings) -> Iterator[Problem]:
    if s.network.vpc and not _NETWORK.match(s.network.vpc):
        yield problem("network.vpc", "want projects/<project>/global/networks/<name>", s.network.vpc)
    for place, subnet in s.network.subnets.items():
        path, found = join("network.subnets", place), _SUBNETWORK.match(subnet)
        if place != s.region:
            yield problem(
                path, f"machines are in {s.region}: want its subnetwork alone", subnet, nearest(place, [s.region])
            )
        elif found is None:
            yield problem(path, "want projects/<project>/regions/<region>/subnetworks/<name>", subnet)
        elif found[1] != s.region:
            yield problem(path, f"is not in {s.region}", subnet)


def even_ticks(s: Settings) -> Iterator[Problem]:
    """Cloud Scheduler's cron begins anew with each hour."""
    if 60 % s.reconcile.tick_minutes:
        near = min((m for m in range(1, 61) if 60 % m == 0), key=lambda m: abs(m - s.reconcile.tick_minutes))
        message = f"does not divide an hour, so ticks would come unevenly: want {near}, for instance"
        yield problem("reconcile.tick_minutes", message, s.reconcile.tick_minutes)


def people(s: Settings) -> Iterator[Problem]:
    kinds = ("user", "serviceAccount")
    for index, member in enumerate(s.reconcile.invokers):
        path = join("reconcile.invokers", index)
        kind, _, address = member.partition(":")
        if kind in ("group", "domain"):
            yield problem(path, f"a token does not tell its caller's {kind}: name each user or service account", member)
        elif kind not in kinds:
            yield problem(path, f"want <kind>:<address>, kind one of {', '.join(kinds)}", member, nearest(kind, kinds))
        elif not EMAIL.match(address):
            yield problem(path, "has no e-mail address behind the colon", member)


def job_identity(s: Settings) -> Iterator[Problem]:
    """A machine is not itself to its jobs: whoever could be it could power off the others."""
    if s.job_identity and not _ACCOUNT.match(s.job_identity):
        yield problem("job_identity", "want <name>@<project>.iam.gserviceaccount.com", s.job_identity)
    elif s.job_identity.partition("@")[0] in {naming.account(s.stack, key) for key in ("vm", "fn", "ck", "bd")}:
        yield problem("job_identity", "is an account of Spotkeeper's own: make one for jobs", s.job_identity)


def secret_names(s: Settings) -> Iterator[Problem]:
    for index, name in enumerate(s.secrets):
        if not _SECRET.match(name):
            message = "want a secret's name, or projects/<project>/secrets/<name>, without a version"
            yield problem(join("secrets", index), message, name)


def bucket_name(s: Settings) -> Iterator[Problem]:
    name = s.bucket_name()
    if s.bucket.name is None and not STACK_NAME.match(s.stack):
        return  # which is said elsewhere
    if not re.fullmatch(r"[a-z0-9][-_a-z0-9]{1,61}[a-z0-9]", name) or name.startswith("goog") or "google" in name:
        yield problem("bucket.name", "is no bucket name (3 to 63 lower-case letters, digits, - and _)", name)


def billing(s: Settings) -> Iterator[Problem]:
    if s.budget is None:
        return
    if not s.budget.billing_account:
        yield Problem("budget.billing_account", "missing, want the billing account that pays: 0123AB-4567CD-89EF01")
    elif not _BILLING.match(s.budget.billing_account):
        yield problem("budget.billing_account", "want six, six and six hexadecimal digits", s.budget.billing_account)


def of_aws(s: Settings) -> Iterator[Problem]:
    yield from only_elsewhere(s, OF_AWS)


OF_AWS: dict[str, tuple[object, str]] = {
    "account": ("", "only aws has it: the project is gcp:project"),
    "service_linked_role": (False, "only aws has one: remove it"),
}
RULES: tuple[Rule, ...] = (
    project_id, image, existing_network, even_ticks, people, job_identity, secret_names, bucket_name, billing,
    of_aws,
)  # fmt: skip


# --- one pool ----------------------------------------------------------------------------


def pool_image(pool: Pool, s: Settings) -> Iterator[Problem]:
    if pool.image != s.image:
        yield from _image("image", pool.image)


def pool_machine(pool: Pool, s: Settings) -> Iterator[Problem]:
    machine = pool.machine
    yield from only_elsewhere(pool, POOL_OF_AWS)
    if machine.type.startswith(_ARM) != (s.agent.arch == "aarch64"):
        yield problem("machine.type", f"is not of agent.arch ({s.agent.arch})", machine.type)
    yield from _accelerator(pool)


POOL_OF_AWS: dict[str, tuple[object, str]] = {
    "machine.efa": (0, "only aws has it: machine.gpu_direct is gcp's"),
    "boot_disk.device": ("", "only aws has it: leave it out"),
}


def _accelerator(pool: Pool) -> Iterator[Problem]:
    machine = pool.machine
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
    elif machine.accelerator.count not in (1, 2, 4, 8, 16):
        yield problem("machine.accelerator.count", "not one of 1, 2, 4, 8, 16", machine.accelerator.count)


def pool_cards(pool: Pool, s: Settings) -> Iterator[Problem]:
    """GPUDirect belongs to a machine type, and needs the card that can."""
    machine = pool.machine
    if machine.gpu_direct is None:
        return
    known = _GPU_DIRECT.get(machine.type)
    if known is None:
        types = ", ".join(_GPU_DIRECT)
        yield problem("machine.gpu_direct", f"{machine.type} has none, only {types}: leave it out", machine.gpu_direct)
    elif machine.gpu_direct != known:
        yield problem("machine.gpu_direct", f"{machine.type} has another", machine.gpu_direct, known)
    elif machine.nic == "virtio":
        yield problem("machine.nic", "GPUDirect needs gvnic: leave it out", machine.nic)
    elif s.network.exists():
        yield problem(
            "machine.gpu_direct", "needs networks of its own: let the stack make its network", machine.gpu_direct
        )
    elif known == "rdma" and len(pool.zones) > 1:
        yield problem("zones", "the network of RDMA cards is of one zone: name one", list(pool.zones))


def pool_notice(pool: Pool, s: Settings) -> Iterator[Problem]:
    if pool.notice_s not in (None, 0, SPOT_NOTICE_S):
        yield problem(
            "notice_s", f"Compute Engine gives {SPOT_NOTICE_S} seconds or none (0, which is 30)", pool.notice_s
        )


def pool_placement(pool: Pool, s: Settings) -> Iterator[Problem]:
    if pool.placement is not None and pool.placement.strategy == "cluster":
        yield problem("placement.strategy", "is what aws calls it", "cluster", "compact")


def pool_disks(pool: Pool, s: Settings) -> Iterator[Problem]:
    for path, kind, size in (
        ("disk", pool.disk.type, pool.disk.size_gb),
        ("boot_disk", pool.boot_disk.type, pool.boot_disk.size_gb),
    ):
        if kind not in _DISKS:
            yield problem(f"{path}.type", "is no disk type", kind, nearest(kind, _DISKS))
        elif size < _DISKS[kind][0]:
            yield problem(f"{path}.size_gb", f"is below {_DISKS[kind][0]}, the smallest {kind}", size)
    if pool.disk.type == "hyperdisk-ml":
        yield problem("disk.type", "is for reading many times, not for checkpoints", pool.disk.type)
    _, operations, throughput = _DISKS.get(pool.disk.type, (0, True, True))
    for name, sold in (("iops", operations), ("mb_s", throughput)):
        if (value := getattr(pool.disk, name)) is not None and not sold:
            yield problem(f"disk.{name}", f"{pool.disk.type} has what its size gives: leave it out", value)


POOL_RULES: tuple[PoolRule, ...] = (
    pool_image, pool_machine, pool_cards, pool_notice, pool_placement, pool_disks
)  # fmt: skip
