"""Google Cloud's defaults and rules for a stack file; ``checks`` describes the form of a rule."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from infra import naming
from infra.catalog import GCP_ACCELERATOR_PRICES, GCP_BUILT_IN, GCP_ZONES
from infra.settings import both, teams
from infra.settings.alerts import EMAIL
from infra.settings.checks import PRIVATE, PoolRule, Rule
from infra.settings.model import OWN_RANGE, Endpoints, Settings
from infra.settings.pool import SPOT_NOTICE_S, DataDisk, Pool
from spotkeeper.contract.notification import GCP_SECRET
from spotkeeper.contract.parse.problem import Problem, join, nearest, problem

COMPUTE = "https://compute.googleapis.com/compute/v1"
STORAGE = "https://storage.googleapis.com"
_IMAGE = re.compile(r"projects/[^/\s]+/global/images/[^/\s]+\Z")
_PROJECT = re.compile(r"[a-z][-a-z0-9]{4,28}[a-z0-9]\Z")
_ACCOUNT = re.compile(r"[a-z][-a-z0-9]{4,28}[a-z0-9]@[a-z][-a-z0-9]{4,28}[a-z0-9]\.iam\.gserviceaccount\.com\Z")
_NETWORK = re.compile(r"projects/[^/\s]+/global/networks/[^/\s]+\Z")
_SUBNETWORK = re.compile(r"projects/[^/\s]+/regions/([^/\s]+)/subnetworks/[^/\s]+\Z")
_A_CHANNEL_SECRET = "want gcp-secret://projects/<project>/secrets/<name>/versions/latest"  # noqa: S105 - a form
_SECRET = re.compile(r"(projects/[^/\s]+/secrets/)?[A-Za-z0-9_-]{1,255}\Z")
_A_NAME = "want a secret's name, or projects/<project>/secrets/<name>, without a version"
_BILLING = re.compile(r"[0-9A-F]{6}-[0-9A-F]{6}-[0-9A-F]{6}\Z")
_ARM = ("t2a-", "c4a-", "n4a-", "a4x-")

_LARGEST = 65_536


class _Disk(NamedTuple):
    """A disk type: its least and largest size in GB, and the ranges of IOPS and MB/s that can be provisioned."""

    least: int
    most: int = _LARGEST
    iops: tuple[int, int] | None = None
    mb_s: tuple[int, int] | None = None


_DISKS: dict[str, _Disk] = {
    "pd-standard": _Disk(10),
    "pd-balanced": _Disk(10),
    "pd-ssd": _Disk(10),
    "pd-extreme": _Disk(500, iops=(10_000, 120_000)),
    "hyperdisk-balanced": _Disk(10, iops=(3000, 160_000), mb_s=(140, 2400)),
    "hyperdisk-extreme": _Disk(64, iops=(128, 350_000)),
    "hyperdisk-throughput": _Disk(2048, 32_768, mb_s=(10, 2400)),
    "hyperdisk-ml": _Disk(10),
}
_SIZES = {kind: (disk.least, disk.most) for kind, disk in _DISKS.items()}
_IOPS_A_GB = {"hyperdisk-balanced": 500, "hyperdisk-extreme": 1200}  # highest IOPS per GB
_BOOTS = ("pd-standard", "pd-balanced", "pd-ssd", "pd-extreme", "hyperdisk-balanced")
# Machine type -> its variant of GPUDirect, by which GPUs reach the network without the CPU.
_GPU_DIRECT: dict[str, str] = {
    "a3-highgpu-8g": "tcpx",
    "a3-megagpu-8g": "tcpxo",
    "a3-ultragpu-8g": "rdma",
    "a4-highgpu-8g": "rdma",
}


_COUNTS = {"nvidia-tesla-p100": (1, 2, 4), "nvidia-tesla-t4": (1, 2, 4), "nvidia-tesla-v100": (1, 2, 4, 8)}
# Families that have Hyperdisk and no Persistent Disk: the fourth generation, and GPUs since A3 Ultra.
_HYPERDISK_ALONE = ("a3-ultragpu-", "a4-", "a4x-", "c4-", "c4a-", "c4d-", "g4-", "n4-", "n4a-", "n4d-")
_HYPERDISK = "hyperdisk-balanced"
_GVNIC_ALONE = ("a3-", "a4-", "a4x-", "c3-", "c3d-", "c4-", "c4a-", "c4d-", "g4-", "h3-", "n4-")
# Families without compact placement. C4A, H4D, M, X and Z are not checked, as the page's table for them could not be
# read; the cloud refuses the first insert of a family without compact placement.
# https://cloud.google.com/compute/docs/instances/placement-policies-overview
_NEVER_NEAR = ("e2-", "f1-", "g1-", "n1-", "n4-", "n4a-", "n4d-", "t2a-", "t2d-")
_PLACES = (*GCP_ZONES, "us", "eu", "asia", "asia1", "eur4", "eur5", "eur7", "eur8", "nam4")  # locations of buckets


def _disk(pool: Pool) -> str:
    return _HYPERDISK if pool.machine.type.startswith(_HYPERDISK_ALONE) else "pd-balanced"


def complete(s: Settings) -> Settings:
    found = both.filled(s, disk=_disk, near="compact", compute=COMPUTE, storage=STORAGE)
    return replace(found, pools=tuple(_with_its_end(pool, s) for pool in found.pools))


def _with_its_end(pool: Pool, s: Settings) -> Pool:
    if pool.kind == "static" or pool.max_run_hours is not None:
        return pool
    return replace(pool, max_run_hours=s.limits.max_run_hours)


def is_local(s: Settings) -> bool:
    """Return whether the stack is in a one-machine cloud, where a project can have any name."""
    return s.endpoints not in (Endpoints(), Endpoints(compute=COMPUTE, storage=STORAGE))


def project_id(s: Settings) -> Iterator[Problem]:
    if not s.project:
        yield Problem("gcp:project", "missing: set the project's id")
    elif not _PROJECT.match(s.project) and not is_local(s):
        yield problem("gcp:project", "is not a project id (6 to 30 lower-case letters, digits and -)", s.project)


def _image(path: str, name: str) -> Iterator[Problem]:
    if "/family/" in name:
        yield problem(path, "is an image family, whose image may change: name one image", name)
    elif not _IMAGE.match(name):
        yield problem(path, "want projects/<project>/global/images/<name>", name)


def subnet_ranges(s: Settings) -> dict[str, str]:
    """Return the address range of the stack's own subnetwork in each region.

    At home it is `network.cidr`. Elsewhere it is one of the ranges of the same size that follow it, by the region's
    place in the catalog, so that it does not change when other regions are added or removed.

    Raises:
        ValueError: `network.cidr` is no IPv4 range, or an address after it does not exist.
    """
    home, order = ipaddress.IPv4Network(s.network.cidr), list(GCP_ZONES)
    found = {s.region: s.network.cidr}
    for region in s.regions[1:]:
        start = int(home.network_address) + (1 + order.index(region)) * home.num_addresses
        found[region] = str(ipaddress.IPv4Network((start, home.prefixlen)))
    return found


def ranges_abroad(s: Settings) -> Iterator[Problem]:
    """Check the address ranges of the other regions; other rules check that of the home region."""
    if s.network.exists() or not all(region in GCP_ZONES for region in s.regions):
        return
    try:
        home, ranges = ipaddress.IPv4Network(s.network.cidr), subnet_ranges(s)
        admitted = [ipaddress.IPv4Network(text) for text in s.network.addresses]
    except ValueError:
        return  # another rule reports it
    block = next((each for each in PRIVATE if home.subnet_of(each)), None)
    for region in s.regions[1:] if block else ():
        found = ipaddress.IPv4Network(ranges[region])
        if block and not found.subnet_of(block):
            told = f"gives {region} the range {found}, which is not within {block}: want a range like {OWN_RANGE}"
            yield problem("network.cidr", told, s.network.cidr)
        elif admitted and not any(map(found.subnet_of, admitted)):
            told = f"lacks {found}, from which machines in {region} get their addresses: add it"
            yield problem("network.addresses", told, list(s.network.addresses))


def existing_network(s: Settings) -> Iterator[Problem]:
    own = " and ".join(s.regions)
    if s.network.vpc and not _NETWORK.match(s.network.vpc):
        yield problem("network.vpc", "want projects/<project>/global/networks/<name>", s.network.vpc)
    for place, subnet in s.network.subnets.items():
        path, found = join("network.subnets", place), _SUBNETWORK.match(subnet)
        if place not in s.regions:
            told = f"machines run only in {own}: name no other region"
            yield problem(path, told, subnet, nearest(place, s.regions))
        elif found is None:
            yield problem(path, "want projects/<project>/regions/<region>/subnetworks/<name>", subnet)
        elif found[1] != place:
            yield problem(path, f"is not in {place}", subnet)
    if s.network.subnets and set(s.network.subnets) < set(s.regions):
        for region in (each for each in s.regions if each not in s.network.subnets):
            yield Problem(join("network.subnets", region), "missing: machines run in this region too")


def even_ticks(s: Settings) -> Iterator[Problem]:
    """Check that an hour is a whole number of ticks, since a schedule of Cloud Scheduler begins anew each hour."""
    if 60 % s.reconcile.tick_minutes:
        near = min((m for m in range(1, 61) if 60 % m == 0), key=lambda m: abs(m - s.reconcile.tick_minutes))
        message = f"does not divide an hour, so ticks would be unevenly spaced: want {near}, for example"
        yield problem("reconcile.tick_minutes", message, s.reconcile.tick_minutes)


def people(s: Settings) -> Iterator[Problem]:
    kinds = ("user", "serviceAccount")
    for path, member in s.people().items():
        kind, _, address = member.partition(":")
        if kind in ("group", "domain"):
            yield problem(path, f"callers cannot be checked by {kind}: name each user or service account", member)
        elif kind not in kinds:
            yield problem(path, f"want <kind>:<address> with kind {' or '.join(kinds)}", member, nearest(kind, kinds))
        elif not EMAIL.match(address):
            yield problem(path, "has no email address after the colon", member)
        elif address.partition("@")[0] in _own(s):
            yield problem(path, "is Spotkeeper's own account, which already has its permissions: leave it out", member)


def team_members(s: Settings) -> Iterator[Problem]:
    """Check that members are written as their tokens name them: by email; on the one-machine cloud by a user's name."""
    callers = set(map(naming.address, s.callers().values()))

    def wrong(path: str, who: str) -> Iterator[Problem]:
        if is_local(s):
            if not re.fullmatch(r"[^\s,]+", who):
                yield problem(path, "want the name of a user of this machine", who)
        elif not EMAIL.match(who) or ":" in who:
            address = naming.address(who)
            yield problem(path, "want an email address", who, address if EMAIL.match(address) else None)
        elif who not in callers:
            told = "may not call the function, so no job counts as this member's: add it to `submitters`, as user:..."
            yield problem(path, told, who)

    return teams.members(s, wrong)


def job_identity(s: Settings) -> Iterator[Problem]:
    """Check that jobs do not run as one of Spotkeeper's accounts, which can power off other jobs' machines."""
    if s.job_identity and not _ACCOUNT.match(s.job_identity):
        yield problem("job_identity", "want <name>@<project>.iam.gserviceaccount.com", s.job_identity)
    elif s.job_identity.partition("@")[0] in _own(s):
        yield problem("job_identity", "is Spotkeeper's own account: create another one for jobs", s.job_identity)


def _own(s: Settings) -> set[str]:
    return {naming.account(s.stack, key) for key in ("vm", "fn", "ck", "bd")}


def secrets_once(s: Settings) -> Iterator[Problem]:
    """Report a secret that is listed twice, under its short name and under its full name."""
    full = [name if "/" in name else f"projects/{s.project}/secrets/{name}" for name in s.secrets]
    for index, name in enumerate(full):
        if name in full[:index] and s.secrets[index] not in s.secrets[:index]:
            yield problem(join("secrets", index), f"is {s.secrets[full.index(name)]} once more", s.secrets[index])


def _is_bucket(name: str) -> bool:
    well = re.fullmatch(r"[a-z0-9][-_a-z0-9]{1,61}[a-z0-9]", name)
    return bool(well) and not name.startswith("goog") and "google" not in name


def bucket_place(s: Settings) -> Iterator[Problem]:
    place = s.bucket.location
    if place is not None and place.lower() not in _PLACES:
        message = "is not a bucket location: want a region, or a multi-region (US, EU, ASIA, NAM4, EUR4 ...)"
        yield problem("bucket.location", message, place, nearest(place.lower(), _PLACES))


def billing(s: Settings) -> Iterator[Problem]:
    if s.budget is None:
        return
    if not s.budget.billing_account:
        yield Problem("budget.billing_account", "missing: set the billing account's id, such as 0123AB-4567CD-89EF01")
    elif not _BILLING.match(s.budget.billing_account):
        yield problem("budget.billing_account", "want an id such as 0123AB-4567CD-89EF01", s.budget.billing_account)


OF_AWS: dict[str, tuple[object, str]] = {
    "account": ("", "only aws has this key: set `gcp:project` instead"),
    "kms_key": ("", "only aws has this setting: leave it out; Google encrypts all disks anyway"),
    "kms_keys": ({}, "only aws has this setting: leave it out; Google encrypts all disks anyway"),
    "images": ({}, "only aws has this key: leave it out; on gcp an image is in all regions"),
    "network.vpcs": ({}, "only aws has this key: leave it out; on gcp a network is in all regions"),
    "service_linked_role": (False, "only aws has this key: leave it out"),
}
RULES: tuple[Rule, ...] = (
    project_id, partial(both.image, wrong=_image), existing_network, ranges_abroad, both.machine_addresses, even_ticks,
    people, team_members, job_identity,
    partial(both.secret_names, like=_SECRET, want=_A_NAME),
    partial(both.channel_secrets, schemes=(GCP_SECRET,), want=_A_CHANNEL_SECRET),
    partial(both.bucket_name, is_one=_is_bucket, characters=", - and _"),
    secrets_once, bucket_place, billing, partial(both.only_elsewhere, fields=OF_AWS),
)  # fmt: skip


# --- one pool ----------------------------------------------------------------------------


POOL_OF_AWS: dict[str, tuple[object, str]] = {
    "images": ({}, "only aws has this key: leave it out; on gcp an image is in all regions"),
    "machine.efa": (0, "only aws has this key: use `machine.gpu_direct` instead"),
    "boot_disk.device": ("", "only aws has this key: leave it out"),
}


def pool_accelerator(pool: Pool, s: Settings) -> Iterator[Problem]:
    machine = pool.machine
    if machine.accelerator is None:
        return
    if machine.type in GCP_BUILT_IN:
        name, count = GCP_BUILT_IN[machine.type]
        yield Problem("machine.accelerator", f"{machine.type} already has {count} x {name}: leave it out")
    elif not machine.type.startswith("n1-"):
        yield problem("machine.accelerator", "accelerators can only be added to n1 machine types", machine.type)
    elif machine.accelerator.type not in GCP_ACCELERATOR_PRICES and not pool.prices:
        hint = nearest(machine.accelerator.type, GCP_ACCELERATOR_PRICES)
        message = f"is not in infra/catalog.py, want one of {', '.join(GCP_ACCELERATOR_PRICES)}"
        yield problem("machine.accelerator.type", message, machine.accelerator.type, hint)
    elif machine.accelerator.count not in (counts := _COUNTS.get(machine.accelerator.type, (1, 2, 4, 8, 16))):
        told = f"want one of {', '.join(map(str, counts))}"
        yield problem("machine.accelerator.count", told, machine.accelerator.count)


def pool_name_abroad(pool: Pool, s: Settings) -> Iterator[Problem]:
    for region in s.regions_of(pool):
        over = len(naming.template(s.stack, pool.name, "spot", region, s.region)) - naming.TEMPLATE_LENGTH
        if over > 0:
            yield problem("name", f"is {over} characters too long for names of templates in {region}", pool.name)


def pool_cards(pool: Pool, s: Settings) -> Iterator[Problem]:
    """Check network card and GPUDirect: a machine type has at most one variant of GPUDirect, which needs gVNIC."""
    machine = pool.machine
    if machine.gpu_direct is None:
        if machine.nic == "virtio" and machine.type.startswith(_GVNIC_ALONE):
            yield problem("machine.nic", f"{machine.type} supports only gvnic: leave `nic` out", machine.nic)
        return
    known = _GPU_DIRECT.get(machine.type)
    if known is None:
        types = ", ".join(_GPU_DIRECT)
        yield problem(
            "machine.gpu_direct", f"{machine.type} has no GPUDirect, only {types}: leave it out", machine.gpu_direct
        )
    elif machine.gpu_direct != known:
        yield problem("machine.gpu_direct", f"{machine.type} has another variant", machine.gpu_direct, known)
    elif machine.nic == "virtio":
        yield problem("machine.nic", "GPUDirect needs gvnic: leave `nic` out, which gives gvnic", machine.nic)
    elif s.network.exists():
        yield problem(
            "machine.gpu_direct", "needs additional networks: let the stack create the network", machine.gpu_direct
        )
    elif known == "rdma" and len(pool.zones) > 1:
        yield problem("zones", "an RDMA network belongs to one zone: name only one", list(pool.zones))
    elif set(s.regions_of(pool)) - {s.region}:
        told = f"the networks of GPUDirect are in the home region {s.region}: name only zones there"
        yield problem("zones", told, list(pool.zones))


def pool_notice(pool: Pool, s: Settings) -> Iterator[Problem]:
    if pool.notice_s not in (None, 0, SPOT_NOTICE_S):
        yield problem("notice_s", f"want {SPOT_NOTICE_S}, or 0 for Compute Engine's default of 30 s", pool.notice_s)


def pool_near(pool: Pool, s: Settings) -> Iterator[Problem]:
    near = pool.placement is not None and pool.placement.strategy == "compact"
    if near and pool.machine.type.startswith(_NEVER_NEAR) and not is_local(s):
        message = f"{pool.machine.type} supports no compact placement: leave it out, or use n2, c2, g2 or a2"
        yield problem("placement.strategy", message, "compact")


def _sizes(kind: str) -> str:
    return f"{kind} disks have {_DISKS[kind].least} to {_DISKS[kind].most} GB"


def pool_disks(pool: Pool, s: Settings) -> Iterator[Problem]:
    if _disk(pool) == _HYPERDISK:
        for path, kind in (("disk.type", pool.disk.type), ("boot_disk.type", pool.boot_disk.type)):
            if kind.startswith("pd-"):
                yield problem(path, f"{pool.machine.type} supports only Hyperdisk", kind, _HYPERDISK)
    if pool.disk.type == "hyperdisk-ml":
        yield problem("disk.type", "is made for data that is mostly read, not for checkpoints", pool.disk.type)
    if pool.boot_disk.type in set(_DISKS) - set(_BOOTS):
        yield problem("boot_disk.type", "cannot boot", pool.boot_disk.type, _HYPERDISK)
    if pool.disk.type in _DISKS:
        yield from _bought(pool.disk, _DISKS[pool.disk.type])


def _bought(disk: DataDisk, kind: _Disk) -> Iterator[Problem]:
    """Check the provisioned IOPS and throughput of a data disk against the ranges of its type."""
    for name, sold in (("iops", kind.iops), ("mb_s", kind.mb_s)):
        value = getattr(disk, name)
        if value is None:
            continue
        if sold is None:
            yield problem(f"disk.{name}", f"leave it out: the size of a {disk.type} disk determines it", value)
            continue
        least, most = sold
        if name == "iops" and disk.type in _IOPS_A_GB:
            most = min(most, max(least, _IOPS_A_GB[disk.type] * disk.size_gb))
        elif name == "mb_s" and disk.iops is not None:
            most = min(most, disk.iops // 4)
        if not least <= value <= most:
            unit = "IOPS" if name == "iops" else "MB/s"
            text = f"a {disk.type} disk of {disk.size_gb} GB can have {least} to {most} {unit}"
            yield problem(f"disk.{name}", text, value)


POOL_RULES: tuple[PoolRule, ...] = (
    partial(both.pool_image, wrong=_image), partial(both.only_elsewhere, fields=POOL_OF_AWS),
    partial(both.pool_architecture, is_arm=lambda kind: kind.startswith(_ARM)),
    pool_name_abroad, pool_accelerator, pool_cards, pool_notice,
    partial(both.pool_near, own="compact", other="cluster", cloud="aws"), pool_near,
    partial(both.pool_disk_sizes, kinds=_SIZES, word="disk", say=_sizes), pool_disks,
)  # fmt: skip
