"""What both clouds ask of a stack file and fill in, each in its own words, which its module gives.

Rules as in ``checks``; what a cloud says of its own comes by name, so that ``partial`` makes a rule of one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from msgspec.structs import replace
from spotkeeper.spec.names import STACK_NAME
from spotkeeper.spec.problem import Problem, join, nearest, problem

from infra.catalog import zones_of
from infra.settings.model import OWN_RANGE, Settings
from infra.settings.pool import Pool

Neutral = Mapping[str, tuple[object, str]]  # path -> the value that says nothing, why no other can be set
Sizes = Mapping[str, tuple[int, float]]  # disk type -> the smallest and the largest in GB
Image = Callable[[str, str], Iterator[Problem]]  # (path, name): what is wrong with it


def filled(s: Settings, *, disk: Callable[[Pool], str], near: str, compute: str, storage: str) -> Settings:
    """Zones, images, disk types, placement and addresses that were left out, filled in.

    Args:
        disk: the type of a pool's disks.
        near: what the cloud calls machines that are near each other.
        compute: where its machines' API answers.
        storage: where its buckets' API answers.
    """
    whole = replace(s, zones=s.zones or zones_of(s.region))
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


def image(s: Settings, *, wrong: Image) -> Iterator[Problem]:
    return wrong("image", s.image)


def pool_image(pool: Pool, s: Settings, *, wrong: Image) -> Iterator[Problem]:
    if pool.image != s.image:
        yield from wrong("image", pool.image)


def secret_names(s: Settings, *, like: re.Pattern[str], want: str) -> Iterator[Problem]:
    for index, name in enumerate(s.secrets):
        if not like.match(name):
            yield problem(join("secrets", index), want, name)


def bucket_name(s: Settings, *, is_one: Callable[[str], bool], characters: str) -> Iterator[Problem]:
    """``characters``: beside lower-case letters and digits."""
    name = s.bucket_name()
    if s.bucket.name is None and not STACK_NAME.match(s.stack):
        return  # which is said elsewhere
    if not is_one(name):
        yield problem("bucket.name", f"is no bucket name (3 to 63 lower-case letters, digits{characters})", name)


def pool_architecture(pool: Pool, s: Settings, *, is_arm: Callable[[str], bool | None]) -> Iterator[Problem]:
    """The agent's wheels are for one. ``is_arm``: of a machine type; None: it is none, which is said elsewhere."""
    arm = is_arm(pool.machine.type)
    if arm is not None and arm != (s.agent.arch == "aarch64"):
        yield problem("machine.type", f"is not of agent.arch ({s.agent.arch})", pool.machine.type)


def pool_near(pool: Pool, _s: Settings, *, own: str, other: str, cloud: str) -> Iterator[Problem]:
    """What this cloud calls ``own``, ``cloud`` calls ``other``."""
    if pool.placement is not None and pool.placement.strategy == other:
        yield problem("placement.strategy", f"is what {cloud} calls it", other, own)


def pool_disk_sizes(
    pool: Pool, _s: Settings, *, kinds: Sizes, word: str, say: Callable[[str], str]
) -> Iterator[Problem]:
    """``say``: of a type, what sizes it has."""
    for path, disk in (("disk", pool.disk), ("boot_disk", pool.boot_disk)):
        if disk.type not in kinds:
            yield problem(f"{path}.type", f"is no {word} type", disk.type, nearest(disk.type, kinds))
        elif not kinds[disk.type][0] <= disk.size_gb <= kinds[disk.type][1]:
            yield problem(f"{path}.size_gb", say(disk.type), disk.size_gb)


def only_elsewhere(value: object, _s: Settings | None = None, *, fields: Neutral) -> Iterator[Problem]:
    """Fields of a stack, or of a pool, that this cloud does not have."""
    for path, (neutral, why) in fields.items():
        found = value
        for name in path.split("."):
            found = None if found is None else getattr(found, name)
        if found is not None and found != neutral:
            yield problem(path, why, found if isinstance(found, str | int | float) else None)
