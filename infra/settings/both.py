"""Defaults and rules of the stack file that exist for both clouds, but with different values.

Each rule takes a cloud's own values as keyword arguments; ``gcp`` and ``aws`` bind these with ``partial``. The
result is a rule of the form that ``checks`` describes.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping

from msgspec.structs import replace

from infra.catalog import zones_of
from infra.settings.model import OWN_RANGE, Settings
from infra.settings.pool import Pool
from spotkeeper.contract.names import STACK_NAME
from spotkeeper.contract.notification import is_reference, secret_of
from spotkeeper.contract.parse.problem import Problem, choices, join, nearest, problem

Neutral = Mapping[str, tuple[object, str]]  # path -> (its default, why no other value is valid)
Sizes = Mapping[str, tuple[int, float]]  # disk type -> the smallest and the largest in GB
IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
Image = Callable[[str, str], Iterator[Problem]]  # (path, image name) -> problems of the name

NEVER = tuple(
    map(ipaddress.ip_network, ("127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/3", "::1/128", "fe80::/10", "ff00::/8"))
)


def filled(s: Settings, *, disk: Callable[[Pool], str], near: str, compute: str, storage: str) -> Settings:
    """Return the settings with what the stack file omits: regions, zones, images, disk types, placement, endpoints ...

    Args:
        disk: returns the default disk type of a pool.
        near: the cloud's name of the placement strategy that puts machines close together.
        compute: the address of the cloud's compute API.
        storage: the address of the cloud's storage API.
    """
    regions = s.regions or (s.region,)
    every = tuple(zone for region in dict.fromkeys(regions) for zone in zones_of(region))
    whole = replace(s, regions=regions, zones=s.zones or every)
    ends = s.endpoints
    return replace(
        whole,
        pools=tuple(_pool(pool, whole, disk, near) for pool in s.pools),
        network=s.network if s.network.exists() or s.network.cidr else replace(s.network, cidr=OWN_RANGE),
        endpoints=replace(ends, compute=ends.compute or compute, storage=ends.storage or storage),
    )


def _pool(pool: Pool, s: Settings, disk: Callable[[Pool], str], near: str) -> Pool:
    return replace(
        pool,
        zones=pool.zones or (() if pool.kind == "static" else s.zones),
        image=pool.image or s.image,
        placement=pool.placement and replace(pool.placement, strategy=pool.placement.strategy or near),
        disk=replace(pool.disk, type=pool.disk.type or disk(pool)),
        boot_disk=replace(pool.boot_disk, type=pool.boot_disk.type or disk(pool)),
    )


def twice(path: str, values: tuple[object, ...]) -> Iterator[Problem]:
    for index, value in enumerate(values):
        if value in values[:index]:
            yield problem(join(path, index), "is named twice", value)


def image(s: Settings, *, wrong: Image) -> Iterator[Problem]:
    return wrong("image", s.image)


def pool_image(pool: Pool, s: Settings, *, wrong: Image) -> Iterator[Problem]:
    if pool.image != s.image:
        yield from wrong("image", pool.image)


def secret_names(s: Settings, *, like: re.Pattern[str], want: str) -> Iterator[Problem]:
    for index, name in enumerate(s.secrets):
        if not like.match(name):
            yield problem(join("secrets", index), want, name)


def channel_secrets(s: Settings, *, schemes: tuple[str, ...], want: str) -> Iterator[Problem]:
    """Check channels' references to secrets; ``schemes``: the schemes of the stack's cloud."""
    for index, channel in enumerate(s.channels):
        reference = channel.address
        if is_reference(reference) and not any(secret_of(reference, scheme) for scheme in schemes):
            path = join("channels", index)
            yield problem(f"{path}.address", f"is not a reference to a secret of {s.cloud}; {want}", reference)


def machine_addresses(s: Settings) -> Iterator[Problem]:
    """Check ``network.addresses``: a machine with another address is never admitted, and costs money until deleted."""
    networks = []
    for index, text in enumerate(s.network.addresses):
        path = join("network.addresses", index)
        try:
            networks.append(found := ipaddress.ip_network(text))
        except ValueError:
            yield problem(path, "is not an address range; want, for example, 100.64.0.0/10", text, range_of(text))
            continue
        if not s.endpoints.compute.startswith("http:") and any(map(found.overlaps, NEVER)):
            yield problem(path, "includes loopback, link-local or multicast addresses: want a smaller range", text)
    try:
        own = None if s.network.exists() else ipaddress.ip_network(s.network.cidr)
    except ValueError:
        return  # another rule reports it
    if own and networks and not any(_within(own, each) for each in networks):
        message = f"lacks `network.cidr` ({own}), from which machines get their addresses: add it"
        yield problem("network.addresses", message, list(s.network.addresses))


def _within(inner: IPNetwork, outer: IPNetwork) -> bool:
    return inner.version == outer.version and inner.network_address in outer and inner.broadcast_address in outer


def range_of(text: str) -> str | None:
    """Return the range around an address with a prefix length, such as 10.0.0.5/24; None for any other text."""
    try:
        return str(ipaddress.ip_network(text, strict=False))
    except ValueError:
        return None


def bucket_name(s: Settings, *, is_one: Callable[[str], bool], characters: str) -> Iterator[Problem]:
    """Check the bucket's name by the cloud's ``is_one``.

    ``characters``: the characters besides lower-case letters and digits that a name may have, for the message.
    """
    name = s.bucket_name()
    if s.bucket.name is None and not STACK_NAME.match(s.stack):
        return  # another rule reports it
    if not is_one(name):
        yield problem("bucket.name", f"is not a bucket name (3 to 63 lower-case letters, digits{characters})", name)


def pool_architecture(pool: Pool, s: Settings, *, is_arm: Callable[[str], bool | None]) -> Iterator[Problem]:
    """Check that a pool's machines have the architecture of the agent's wheels.

    ``is_arm`` returns None for a name that is not a machine type, which another rule reports.
    """
    arm = is_arm(pool.machine.type)
    if arm is not None and arm != (s.agent.arch == "aarch64"):
        yield problem("machine.type", f"has another architecture than `agent.arch` ({s.agent.arch})", pool.machine.type)


def pool_near(pool: Pool, _s: Settings, *, own: str, other: str, cloud: str) -> Iterator[Problem]:
    """Report the placement strategy ``other``, which is the other cloud's name for ``own``; suggest ``own``."""
    if pool.placement is not None and pool.placement.strategy == other:
        yield problem("placement.strategy", f"is {cloud}'s name for {own}", other, own)


def pool_disk_sizes(
    pool: Pool, _s: Settings, *, kinds: Sizes, word: str, say: Callable[[str], str]
) -> Iterator[Problem]:
    """Check types and sizes of a pool's disks.

    ``kinds``: the cloud's disk types with their sizes; ``word``: what the cloud calls a disk; ``say``: returns the
    message about the sizes of a disk type.
    """
    for path, disk in (("disk", pool.disk), ("boot_disk", pool.boot_disk)):
        if disk.type not in kinds:
            message = f"is not a {word} type, want one of {choices(disk.type, kinds)}"
            yield problem(f"{path}.type", message, disk.type, nearest(disk.type, kinds))
        elif not kinds[disk.type][0] <= disk.size_gb <= kinds[disk.type][1]:
            yield problem(f"{path}.size_gb", say(disk.type), disk.size_gb)


def only_elsewhere(value: object, _s: Settings | None = None, *, fields: Neutral) -> Iterator[Problem]:
    """Report each of ``fields``, which only the other cloud has, that is set in ``value`` (the settings or a pool)."""
    for path, (neutral, why) in fields.items():
        found = value
        for name in path.split("."):
            found = None if found is None else getattr(found, name)
        if found is not None and found != neutral:
            yield problem(path, why, found if isinstance(found, str | int | float) else None)


def idle_regions(s: Settings) -> Iterator[str]:
    """Yield a caution for each region in which no pool has a zone: the file is valid, but no machine runs there."""
    for index, region in enumerate(s.regions):
        if not any(region in s.regions_of(pool) for pool in s.pools):
            remedy = f"add zones of {region} to `zones` or to a pool's" + (", or remove the region" if index else "")
            yield f"{join('regions', index)}: no pool has a zone in {region}: {remedy}"
