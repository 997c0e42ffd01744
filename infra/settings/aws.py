"""AWS's defaults and rules for a stack file; ``checks`` describes the form of a rule."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from functools import partial

from msgspec.structs import replace

from infra import naming
from infra.catalog import AWS_EFA, AWS_FIRST_EFA_CARD, AWS_PRICES, AWS_WITHOUT_URLS
from infra.settings import both, teams
from infra.settings.checks import PoolRule, Rule
from infra.settings.model import Settings
from infra.settings.pool import SPOT_NOTICE_S, DataDisk, Pool
from spotkeeper.contract.notification import AWS_PARAMETER, AWS_SECRET
from spotkeeper.contract.parse.problem import Problem, join, nearest, problem
from spotkeeper.contract.stack import Interface

ROOT_DEVICE = "/dev/sda1"
LONGEST_S = 900  # longest timeout of a Lambda function
MOST_REGIONS = 5
_MOST_SPREAD = 6  # a spread group takes 7 machines per zone; one place is for a replacement
_MAILS = 5  # most thresholds of a budget
_KEPT = 5  # addresses that AWS reserves in each subnet
_PARTS = 8  # subnets that a network's range is split into; no region has more zones
_ACCOUNT = re.compile(r"[0-9]{12}\Z")
_IMAGE = re.compile(r"(ami-[0-9a-f]{8}([0-9a-f]{9})?|resolve:ssm:[\w./-]+:[1-9]\d*)\Z", re.ASCII)
_ROLE = re.compile(r"arn:aws:iam::(\d{12}):role(/[\w+=,.@-]+)+\Z", re.ASCII)
_CALLER = re.compile(r"arn:aws:iam::\d{12}:(role|user)(/[\w+=,.@-]+)+\Z", re.ASCII)
_A_CHANNEL_SECRET = "want aws-secret://<ARN> or aws-parameter://<ARN>"  # noqa: S105 - a form
_SECRET = re.compile(r"(arn:aws:secretsmanager:[a-z0-9-]+:\d{12}:secret:)?[\w/+=.@-]{1,512}\Z", re.ASCII)
_KEY = re.compile(r"arn:aws:kms:([a-z0-9-]+):\d{12}:key/[\w-]+\Z", re.ASCII)
_VPC = re.compile(r"vpc-[0-9a-f]{8,17}\Z")
_COPY_IT = "copy `image` into this region (aws ec2 copy-image) and name the copy, as EC2 has images by region"
_BUCKET = re.compile(r"[a-z0-9][-a-z0-9]{1,61}[a-z0-9]\Z")
_BURSTABLE = re.compile(r"t\d[a-z]*\.")

_OTHERS = ("-s3alias", "--ol-s3", "--x-s3", "--table-s3")  # suffixes that S3 reserves for other resources
# Disk type -> its smallest and largest size in GB.
_DISKS: dict[str, tuple[int, int]] = {
    "gp3": (1, 65_536),
    "gp2": (1, 16_384),
    "io1": (4, 16_384),
    "io2": (4, 65_536),
    "st1": (125, 16_384),
    "sc1": (125, 16_384),
}
_IOPS = {"io1": (50, 64_000), "io2": (1000, 256_000)}  # most operations per GB, most in all


def complete(s: Settings) -> Settings:
    found = both.filled(
        s,
        disk=lambda _: "gp3",
        near="cluster",
        compute=f"https://ec2.{s.region}.amazonaws.com",
        storage=f"https://s3.{s.region}.amazonaws.com",
    )
    pools = zip(found.pools, s.pools, strict=True)
    return replace(found, pools=tuple(_filled(pool, given, s.images) for pool, given in pools))


def _filled(pool: Pool, given: Pool, images: dict[str, str]) -> Pool:
    """Return the pool with its root device, and with the stack's ``images`` if its own ``image`` is unset."""
    disk = replace(pool.boot_disk, device=pool.boot_disk.device or ROOT_DEVICE)
    return replace(pool, boot_disk=disk, images=pool.images or ({} if given.image else images))


def region_has_urls(s: Settings) -> Iterator[Problem]:
    if s.home_region() in AWS_WITHOUT_URLS:
        first, what = ("regions[0]", "home region") if len(s.regions) > 1 else ("region", "region")
        path = "home" if s.home else first
        yield problem(
            path, f"has no Lambda function URLs, which Spotkeeper needs: want another {what}", s.home_region()
        )


def of_other_regions(s: Settings) -> Iterator[Problem]:
    """Check that images, keys and networks are given for each other region, as EC2 has them by region."""
    if len(s.regions) > MOST_REGIONS:
        told = f"are too many: want at most {MOST_REGIONS}, so that the function's rights fit into a role of AWS"
        yield problem("regions", told, list(s.regions))
    for field, given in (("images", s.images), ("kms_keys", s.kms_keys), ("network.vpcs", s.network.vpcs)):
        yield from _abroad(field, given, s)
    for region, name in s.images.items():
        yield from _image(join("images", region), name)
    users = [pool for pool in s.pools if pool.image == s.image and pool.images == s.images]
    for region in s.regions[1:]:
        if region not in s.images and any(region in s.regions_of(pool) for pool in users):
            yield Problem(join("images", region), f"missing: {_COPY_IT}")
        if s.kms_key and region not in s.kms_keys:
            yield Problem(join("kms_keys", region), "missing: `kms_key` encrypts only disks of the home region")
        if s.network.vpc and region not in s.network.vpcs:
            yield Problem(join("network.vpcs", region), "missing: `network.vpc` is only in the home region")
    for region, vpc in s.network.vpcs.items():
        if not _VPC.match(vpc):
            yield problem(join("network.vpcs", region), "want vpc-...", vpc)
    if s.kms_keys and not s.kms_key:
        yield Problem("kms_key", "missing: `kms_keys` has only the keys of the other regions")


def _abroad(field: str, given: Mapping[str, str], s: Settings) -> Iterator[Problem]:
    for region, value in given.items():
        if region == s.region:
            told = f"leave it out: `{field.removesuffix('s')}` is that of the home region"
            yield problem(join(field, region), told, value)
        elif region not in s.regions:
            told = "is not one of the stack's `regions`: name no other region"
            yield problem(join(field, region), told, value, nearest(region, s.regions))


def account(s: Settings) -> Iterator[Problem]:
    if not s.account:
        yield Problem("account", 'missing: set the account id, for example "123456789012"')
    elif not _ACCOUNT.match(s.account):
        yield problem("account", "is not an account id: want 12 digits in quotes", s.account)


def _image(path: str, name: str) -> Iterator[Problem]:
    if re.match(r"resolve:ssm:[^:]+(:[^:]*\D[^:]*)?\Z", name):  # without a version, or with a label
        message = "is a parameter whose value may change: add its version, as in resolve:ssm:<name>:<version>"
        yield problem(path, message, name)
    elif not _IMAGE.match(name):
        yield problem(path, "want ami-... or resolve:ssm:<name>:<version>", name)


def existing_network(s: Settings) -> Iterator[Problem]:
    network = s.network
    if network.vpc and not _VPC.match(network.vpc):
        yield problem("network.vpc", "want vpc-...", network.vpc)
    for zone, subnet in network.subnets.items():
        path = join("network.subnets", zone)
        if zone not in s.zones:
            yield problem(path, "is not one of the stack's zones", subnet, nearest(zone, s.zones))
        elif not re.match(r"subnet-[0-9a-f]{8,17}\Z", subnet):
            yield problem(path, "want subnet-...", subnet)
        elif (first := next(other for other, named in network.subnets.items() if named == subnet)) != zone:
            yield problem(path, f"is already the subnet of {first}, and a subnet is in one zone only", subnet)
    if network.subnets:
        for zone in sorted({zone for pool in s.pools for zone in pool.zones} - set(network.subnets)):
            yield Problem(join("network.subnets", zone), "missing, although a pool uses this zone")


def subnet_range(cidr: str, zone: str) -> str:
    """Return a zone's subnet range. The zone's letter chooses it, so that a new zone moves no other zone's range."""
    ranges = ipaddress.IPv4Network(cidr).subnets(prefixlen_diff=_PARTS.bit_length() - 1)
    return str(list(ranges)[ord(zone[-1]) - ord("a")])


def subnets_hold_their_nodes(s: Settings) -> Iterator[Problem]:
    """Check that a zone's subnet (all have one size) has an address for every machine of the largest pool."""
    try:
        network = ipaddress.IPv4Network(s.network.cidr)
    except ValueError:
        return  # another rule reports it, or the network exists
    if not 16 <= network.prefixlen <= 24:
        yield problem("network.cidr", "want /16 to /24: it is divided into a subnet for each zone", s.network.cidr)
        return
    size, most = network.num_addresses // _PARTS - _KEPT, max((pool.size for pool in s.pools), default=0)
    if size < most:
        message = f"gives each zone's subnet (an eighth of this range) {size} addresses, but a pool has {most} machines"
        yield problem("network.cidr", message, s.network.cidr)


def callers(s: Settings) -> Iterator[Problem]:
    for path, caller in s.people().items():
        if not _CALLER.match(caller):
            message = "want the ARN of a role or user, such as arn:aws:iam::123456789012:role/operators"
            yield problem(path, message, caller)
        elif _is_own(caller, s):
            message = "is Spotkeeper's own role, which already has its permissions: leave it out"
            yield problem(path, message, caller)


def team_members(s: Settings) -> Iterator[Problem]:
    """Check that members are ARNs of callers."""
    role = f"arn:aws:iam::{s.account}:role/{naming.account(s.stack, 'sb')}"

    def wrong(path: str, who: str) -> Iterator[Problem]:
        if not _CALLER.match(who):
            yield problem(path, "want the ARN of a role or user, such as arn:aws:iam::123456789012:role/vision", who)
        elif who == role:
            yield problem(path, "is the role of all submitters: name the submitters themselves", who)
        elif who not in (*s.reconcile.invokers, *s.submitters):
            told = "may not call the function, so no job counts as this member's: add it to `submitters`"
            yield problem(path, told, who)

    return teams.members(s, wrong)


def submitters(s: Settings) -> Iterator[Problem]:
    """Check that the names of submitters' sessions tell them apart, and fit into the trust policy of their role."""
    known: dict[str, str] = {}
    for index, who in enumerate(s.submitters):
        if (other := known.setdefault(who.rpartition("/")[2], who)) != who:
            told = f"has the name of {other}, and its session in the submitters' role too: give one another name"
            yield problem(join("submitters", index), told, who)


def _is_own(role: str, s: Settings) -> bool:
    return role.rsplit("/", 1)[1].startswith(naming.machine_prefix(s.stack))


def job_identity(s: Settings) -> Iterator[Problem]:
    """Check that jobs do not run as one of Spotkeeper's roles, which can end other jobs' machines."""
    if not s.job_identity:
        return
    if not _ROLE.match(s.job_identity):
        yield problem("job_identity", "want a role's ARN, such as arn:aws:iam::123456789012:role/a", s.job_identity)
    elif _is_own(s.job_identity, s):
        yield problem("job_identity", "is Spotkeeper's own role: create another role for jobs", s.job_identity)
    elif s.secrets and f"::{s.account}:" not in s.job_identity:
        message = "is a role of another account: remove `secrets`, and allow this role to read them yourself"
        yield problem("job_identity", message, s.job_identity)


def _is_bucket(name: str) -> bool:
    taken = name.startswith(("xn--", "sthree-", "amzn-s3-demo-")) or name.endswith(_OTHERS)
    return bool(_BUCKET.match(name)) and not taken


def keys(s: Settings) -> Iterator[Problem]:
    yield from _key("kms_key", s.kms_key, s.region, s.account)
    for region, key in s.kms_keys.items():
        yield from _key(join("kms_keys", region), key, region, s.account)


def _key(path: str, key: str, region: str, account: str) -> Iterator[Problem]:
    found = _KEY.match(key)
    if key and not found:
        example = f"arn:aws:kms:{region}:{account}:key/1234abcd-12ab-34cd-56ef-1234567890ab"
        yield problem(path, f"want the ARN of a key, not an alias, such as {example}", key)
    elif found and found[1] != region:
        yield problem(path, f"is in another region than the stack's disks: want a key in {region}", key)


def budget_mails(s: Settings) -> Iterator[Problem]:
    steps = s.budget.alert_at if s.budget is not None and s.alerts.email else ()
    if len(steps) > _MAILS:
        yield problem("budget.alert_at", f"has too many thresholds: AWS allows {_MAILS}", list(steps))


def function(s: Settings) -> Iterator[Problem]:
    if s.reconcile.timeout_s > LONGEST_S:
        yield problem("reconcile.timeout_s", f"is above Lambda's limit of {LONGEST_S} s", s.reconcile.timeout_s)


OF_GCP: dict[str, tuple[object, str]] = {
    "bucket.location": (None, "only gcp has this key: leave it out; the bucket is in the stack's region"),
    "limits.max_run_hours": (None, "only gcp has this key: use `limits.lease_minutes`; EC2 has no time limit"),
    "budget.billing_account": ("", "only gcp has this key: leave it out; AWS always bills the stack's account"),
    "endpoints.jwks": ("", "only gcp has this key: leave it out; AWS itself authenticates callers"),
    "endpoints.issuer": ("", "only gcp has this key: leave it out; AWS itself authenticates callers"),
}
RULES: tuple[Rule, ...] = (
    account, region_has_urls, of_other_regions, partial(both.image, wrong=_image), existing_network,
    subnets_hold_their_nodes, callers, submitters, team_members, job_identity,
    partial(both.secret_names, like=_SECRET, want="want a secret's name or ARN"),
    partial(both.channel_secrets, schemes=(AWS_SECRET, AWS_PARAMETER), want=_A_CHANNEL_SECRET),
    partial(both.bucket_name, is_one=_is_bucket, characters=" and -"),
    both.machine_addresses, keys, budget_mails, function, partial(both.only_elsewhere, fields=OF_GCP),
)  # fmt: skip


# --- one pool ----------------------------------------------------------------------------


def pool_images(pool: Pool, s: Settings) -> Iterator[Problem]:
    if pool.image == s.image and pool.images == s.images:
        return  # a rule of the whole stack reports it
    yield from _abroad("images", pool.images, s)
    for region, name in pool.images.items():
        yield from _image(join("images", region), name)
    for region in s.regions_of(pool):
        if region != s.region and region not in pool.images:
            yield Problem(join("images", region), f"missing: {_COPY_IT}")


def _is_arm(kind: str) -> bool | None:
    found = re.fullmatch(r"([a-z][a-z0-9-]*?)\.([a-z0-9-]+)", kind)
    return None if found is None else bool(re.fullmatch(r"(a1|[a-z]+\d+g[a-z]*)", found[1]))


def pool_cards(pool: Pool, s: Settings) -> Iterator[Problem]:
    efa, kind = pool.machine.efa, pool.machine.type
    most = AWS_EFA.get(kind, 0)
    if _is_arm(kind) is None:
        return  # not a machine type, which another rule reports
    if efa > most and (most or kind in AWS_PRICES):
        yield problem("machine.efa", f"{kind} has at most {most}" if most else f"{kind} has no EFA: leave it out", efa)
    elif efa > most:
        message = f"infra/catalog.py does not list the EFA network cards of {kind}: add them, or leave `efa` out"
        yield problem("machine.efa", message, efa)
    elif len(interfaces(pool)) > 1 and s.network.public_ip:
        message = "set `network.public_ip: false`: with several network cards a machine gets no public address"
        yield problem("machine.efa", message, efa)


def interfaces(pool: Pool) -> tuple[Interface, ...]:
    """Return the network interfaces of a pool with EFA in the layout that EC2's guide gives; () without EFA.

    The first interface has the IP address; the adapters of EFA cards have none. But if only card 0 has EFA, its adapter
    is the first interface.
    """
    efa, first = pool.machine.efa, AWS_FIRST_EFA_CARD.get(pool.machine.type, 0)
    if not efa:
        return ()
    if efa == 1 and not first:
        return (Interface(0, device=0, kind="efa"),)
    adapters = (Interface(card, device=0 if card else 1, kind="efa-only") for card in range(first, first + efa))
    return (Interface(0, device=0, kind="interface"), *adapters)


def pool_notice(pool: Pool, s: Settings) -> Iterator[Problem]:
    if pool.kind == "spot" and pool.notice_s not in (None, SPOT_NOTICE_S):
        yield problem("notice_s", f"EC2's notice is always {SPOT_NOTICE_S} s: leave it out", pool.notice_s)


POOL_OF_GCP: dict[str, tuple[object, str]] = {
    "machine.accelerator": (None, "only gcp has this key: leave it out; on aws a machine type includes accelerators"),
    "machine.nic": (None, "only gcp has this key: leave it out"),
    "machine.gpu_direct": (None, "only gcp has this key: use `machine.efa` instead"),
    "placement.max_distance": (None, "only gcp has this key: leave it out"),
    "max_run_hours": (None, "only gcp has this key: leave it out; EC2 has no time limit"),
}


def pool_placement(pool: Pool, s: Settings) -> Iterator[Problem]:
    most = _MOST_SPREAD * max(1, len(pool.zones))
    strategy = pool.placement.strategy if pool.placement is not None else None
    if strategy == "cluster" and _BURSTABLE.match(pool.machine.type):
        yield problem(
            "placement.strategy", f"{pool.machine.type} supports no cluster placement: leave it out", strategy
        )
    if strategy == "spread" and pool.size > most:
        message = f"want at most {most}: spread placement has {_MOST_SPREAD + 1} places per zone, one for a replacement"
        yield problem("size", message, pool.size)


def pool_disks(pool: Pool, s: Settings) -> Iterator[Problem]:
    if not re.fullmatch(r"/dev/(xvda|sda1?)", pool.boot_disk.device):  # another name would add an empty disk
        yield problem("boot_disk.device", "want the image's root device: /dev/sda1 or /dev/xvda", pool.boot_disk.device)
    if pool.boot_disk.type in ("st1", "sc1"):
        yield problem("boot_disk.type", "cannot boot: want gp3", pool.boot_disk.type)
    elif pool.boot_disk.type in ("io1", "io2"):
        yield problem(
            "boot_disk.type", "is priced by IOPS, which a boot disk does not need: want gp3", pool.boot_disk.type
        )
    yield from _bought(pool.disk)


def _sizes(kind: str) -> str:
    least, most = _DISKS[kind]
    return f"{kind} volumes have {least} to {most} GB"


def _bought(disk: DataDisk) -> Iterator[Problem]:
    """Check the provisioned IOPS and throughput of a data disk against the ranges of its type."""
    if disk.type in ("io1", "io2") and disk.iops is None:
        yield Problem("disk.iops", f"missing: an {disk.type} disk needs a number of IOPS")
    elif disk.type in _IOPS and disk.iops is not None:
        a_gb, most = _IOPS[disk.type]
        most = min(most, a_gb * disk.size_gb)
        if disk.iops > most:
            yield problem("disk.iops", f"{disk.type} of {disk.size_gb} GB can have 100 to {most} IOPS", disk.iops)
    if disk.type in ("gp2", "st1", "sc1") and disk.iops is not None:
        yield problem("disk.iops", f"leave it out: the size of a {disk.type} disk determines it", disk.iops)
    if disk.type in _DISKS and disk.type != "gp3" and disk.mb_s is not None:
        yield problem("disk.mb_s", f"leave it out: the size of a {disk.type} disk determines it", disk.mb_s)
    if disk.type != "gp3":
        return
    iops = 3000 if disk.iops is None else disk.iops
    most = min(80_000, max(3000, 500 * disk.size_gb))
    if not 3000 <= iops <= most:
        yield problem("disk.iops", f"a gp3 disk of {disk.size_gb} GB can have 3000 to {most} IOPS", iops)
    fastest = min(2000, max(125, iops // 4))
    if disk.mb_s is not None and not 125 <= disk.mb_s <= fastest:
        yield problem("disk.mb_s", f"a gp3 disk with {iops} IOPS can have 125 to {fastest} MB/s", disk.mb_s)


POOL_RULES: tuple[PoolRule, ...] = (
    partial(both.pool_image, wrong=_image), pool_images, partial(both.pool_architecture, is_arm=_is_arm), pool_cards,
    partial(both.only_elsewhere, fields=POOL_OF_GCP), pool_notice,
    partial(both.pool_near, own="cluster", other="compact", cloud="gcp"), pool_placement,
    partial(both.pool_disk_sizes, kinds=_DISKS, word="volume", say=_sizes), pool_disks,
)  # fmt: skip
