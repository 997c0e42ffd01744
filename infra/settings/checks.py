"""Rules that a stack file must satisfy on any cloud. Each rule is a function from settings to problems.

A problem names the path, the value, and the nearest valid name or the remedy. A rule for pools gives paths relative to
the pool. Types and ranges have been checked before; a rule reads no file, no environment variable and no cloud.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import takewhile
from pathlib import PurePosixPath

from infra.catalog import AWS_PRICES, AWS_ZONES, GCP_PRICES, GCP_ZONES, zones_of
from infra.settings import alerts, teams
from infra.settings.both import range_of, twice
from infra.settings.model import Settings
from infra.settings.pool import Pool
from infra.settings.reserved import pool_reservations
from spotkeeper.contract.names import POOL_NAME, STACK_NAME
from spotkeeper.contract.parse.problem import Problem, choices, join, nearest, problem

Rule = Callable[[Settings], Iterator[Problem]]
PoolRule = Callable[[Pool, Settings], Iterator[Problem]]

PRIVATE = tuple(map(ipaddress.IPv4Network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")))  # RFC 1918
_PRICES = {"gcp": GCP_PRICES, "aws": AWS_PRICES}
_REGIONS = {"gcp": GCP_ZONES, "aws": AWS_ZONES}
_MACHINE = {"gcp": re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)+\Z"), "aws": re.compile(r"[a-z][a-z0-9-]*\.[a-z0-9-]+\Z")}
OURS = 8  # labels on a resource that are kept for Spotkeeper itself
_LABEL_KEY = re.compile(r"[a-z][-_a-z0-9]{0,62}\Z")
_LABEL_VALUE = re.compile(r"[-_a-z0-9]{0,63}\Z")
# Folders that `.github/workflows` ignore: a change there starts neither `up` nor a preview.
UNWATCHED = ("bench", "docs", "tests")
NOT_WATCHED = f"is in one of the folders {', '.join(UNWATCHED)}, whose changes start neither a preview nor an `up`"
_SAFE = re.compile(r"https://|http://(localhost|127\.\d+\.\d+\.\d+|\[::1\])([:/]|\Z)")
_STACK_REFERENCE = re.compile(r"[^/\s]+/[^/\s]+/[^/\s]+\Z")
_LEAST_TICKS_OF_LEASE = 3  # one or two lost ticks must not power machines off
_OVER_BEFORE = "is shorter than two boot deadlines (`limits.boot_deadline_s`), so machines might end before they train"
_NAME = "want a letter, then letters, digits and -, at most 24, all lower case"

# Keys of other tools and of rejected features, for which the nearest valid name would mislead -> what to do instead.
ELSEWHERE: Mapping[str, str] = {
    "max_price": "there is no price cap: spot never costs more than on-demand, and a lower cap only adds preemptions",
    "spot_price": "there is no price cap: spot never costs more than on-demand; `prices` corrects list prices",
    "reuse_boot": "boot disks are always deleted; the node's data disk is kept",
    "reuseBoot": "boot disks are always deleted; the node's data disk is kept",
    "min": "a pool has no minimum size: jobs request machines (`nodes.min` in a job file)",
    "target": "a pool has no target size: jobs request machines",
    "count": "use size",
    "service_account": "Spotkeeper creates the machines' service account; `job_identity` sets the account of jobs",
    "instance_type": "use machine.type",
    "machine_type": "use machine.type",
    "user_data": "machines run only Spotkeeper's boot script; put what a job needs into its source or its image",
    "startup_script": "machines run only Spotkeeper's boot script; put what a job needs into its source or its image",
    "zone": "use zones, a list",
}


def explained(found: Problem) -> Problem:
    """Return the problem with advice if its key is another tool's (``ELSEWHERE``) or has an alternative."""
    key = found.path.rsplit(".", 1)[-1]
    if found.path == "region" and found.message.startswith("missing"):
        return replace(found, message="missing, want a region's name, or `regions` with a list of names")
    if not found.message.startswith("unknown key") or key not in ELSEWHERE:
        return found
    return replace(found, message=f"unknown key: {ELSEWHERE[key]}", hint=None)


# --- the whole stack --------------------------------------------------------------------


def stack_name(s: Settings) -> Iterator[Problem]:
    if not STACK_NAME.match(s.stack):
        yield problem("stack", _NAME, s.stack)


def regions(s: Settings) -> Iterator[Problem]:
    for index, region in enumerate(s.regions):
        path = join("regions", index) if len(s.regions) > 1 else "region"
        if region not in _REGIONS[s.cloud]:
            near = nearest(region, _REGIONS[s.cloud])
            yield problem(path, f"is not a region of {s.cloud} in infra/catalog.py", region, near)
    yield from twice("regions", s.regions)


def home(s: Settings) -> Iterator[Problem]:
    if s.home and s.home not in s.regions:
        yield problem("home", "is not one of the stack's `regions`", s.home, nearest(s.home, s.regions))


def warm_copies(s: Settings) -> Iterator[Problem]:
    if s.limits.warm_copies_usd is not None and len(s.regions) < 2:
        told = "has no effect: with a single region, no copy goes to another one"
        yield problem("limits.warm_copies_usd", told, s.limits.warm_copies_usd)


def _known_zones(s: Settings) -> tuple[str, ...]:
    """Return the zones of the stack's regions; () if one is unknown or named twice, which another rule reports."""
    known = all(region in _REGIONS[s.cloud] for region in s.regions) and len(set(s.regions)) == len(s.regions)
    return tuple(zone for region in s.regions for zone in zones_of(region)) if known else ()


def _where(s: Settings) -> str:
    return " or ".join(s.regions)


def zones_in_region(s: Settings) -> Iterator[Problem]:
    known = _known_zones(s)
    for index, zone in enumerate(s.zones if known else ()):
        yield from _zone(join("zones", index), zone, s.zones[:index], known, f"a zone of {_where(s)}")


def _zone(path: str, zone: str, before: tuple[str, ...], known: tuple[str, ...], what: str) -> Iterator[Problem]:
    if zone in before:
        yield problem(path, "is named twice", zone)
    elif zone not in known:
        yield problem(path, f"is not {what}", zone, nearest(zone, known))


def network_is_one(s: Settings) -> Iterator[Problem]:
    """Check that the network comes from exactly one of ``cidr``, ``vpc`` with ``subnets``, and ``from_stack``."""
    network = s.network
    if network.from_stack and (network.vpc or network.vpcs or network.subnets):
        told = "cannot be used with `vpc`, `vpcs` or `subnets`: remove one"
        yield problem("network.from_stack", told, network.from_stack)
    elif network.from_stack and not _STACK_REFERENCE.match(network.from_stack):
        yield problem("network.from_stack", "want <organization>/<project>/<stack>", network.from_stack)
    if network.vpc and not network.subnets:
        yield Problem("network.subnets", "missing: an existing network (`network.vpc`) needs its subnets")
    if (network.subnets or network.vpcs) and not network.vpc:
        field = "network.subnets" if network.subnets else "network.vpcs"
        told = "the network that has these subnets" if network.subnets else "the network of the home region"
        yield Problem("network.vpc", f"missing: `{field}` needs {told}")
    if network.exists() and network.cidr:
        yield problem("network.cidr", "is only for a new network, but this network exists: leave it out", network.cidr)


def network_range(s: Settings) -> Iterator[Problem]:
    if s.network.exists():
        return
    try:
        network = ipaddress.ip_network(s.network.cidr)
    except ValueError:
        yield problem("network.cidr", "is not an address range", s.network.cidr, range_of(s.network.cidr))
        return
    nodes = sum(pool.size for pool in s.pools)
    if not isinstance(network, ipaddress.IPv4Network) or not any(network.subnet_of(each) for each in PRIVATE):
        ranges = ", ".join(map(str, PRIVATE))
        yield problem("network.cidr", f"want a private IPv4 range, within one of {ranges}", s.network.cidr)
    elif network.num_addresses - 4 < nodes:  # both clouds reserve at least 4
        least = 32 - (nodes + 3).bit_length()
        yield problem("network.cidr", f"has too few addresses for {nodes} machines: want /{least}", s.network.cidr)


def lease_spans_ticks(s: Settings) -> Iterator[Problem]:
    lease, least = s.limits.lease_minutes, _LEAST_TICKS_OF_LEASE * s.reconcile.tick_minutes
    if lease < least:
        told = f"is below {least}, the length of {_LEAST_TICKS_OF_LEASE} ticks (`reconcile.tick_minutes`)"
        yield problem("limits.lease_minutes", told, lease)
    elif s.alerts.email and lease <= s.alerts.missed_minutes:
        told = f"is not above `alerts.missed_minutes` ({s.alerts.missed_minutes}): machines would end before the alarm"
        yield problem("limits.lease_minutes", told, lease)


def run_outlasts_boot(s: Settings) -> Iterator[Problem]:
    hours = s.limits.max_run_hours
    if hours is not None and hours * 3600 < 2 * s.boot_deadline_s():
        yield problem("limits.max_run_hours", _OVER_BEFORE, hours)


def machine_cap(s: Settings) -> Iterator[Problem]:
    """Report a limit on machines that is above the sum of the pools' sizes."""
    most, cap = sum(pool.size for pool in s.dynamic()), s.limits.machines
    if cap is not None and not s.dynamic():
        yield problem("limits.machines", "limits nothing: the stack has no spot pool", cap)
    elif cap is not None and cap > most:
        yield problem("limits.machines", f"limits nothing: the spot pools' sizes add up to {most}", cap)


def spend_cap(s: Settings) -> Iterator[Problem]:
    cap = s.limits.usd_per_hour
    if cap is None:
        return
    found = [price for pool in s.dynamic() for zone in pool.zones if (price := pool.price(zone))]
    cheapest = min((price.spot or price.on_demand for price in found), default=None)
    if cheapest is None:
        yield problem("limits.usd_per_hour", "limits nothing: no spot pool has a price", cap)
    elif cap < cheapest:
        yield problem("limits.usd_per_hour", f"is below the price of every machine: the cheapest costs {cheapest}", cap)


def function_timeout(s: Settings) -> Iterator[Problem]:
    """Limit the function's timeout to five ticks: later ticks wait until a slow tick ends and its leases are free."""
    if s.reconcile.timeout_s > 60 * s.reconcile.tick_minutes * 5:
        told = f"is longer than five ticks ({300 * s.reconcile.tick_minutes} s): later ticks would wait for a slow one"
        yield problem("reconcile.timeout_s", told, s.reconcile.timeout_s)


def fallback_times(s: Settings) -> Iterator[Problem]:
    short, window = s.fallback.short_life_minutes, s.fallback.window_minutes
    if short > window:
        yield problem("fallback.short_life_minutes", f"is above window_minutes ({window:g})", short)


def interpreter(s: Settings) -> Iterator[Problem]:
    name = s.agent.interpreter
    if not re.fullmatch(r"(/[\w.+-]+)+|\w[\w.+-]*", name, re.ASCII):
        yield problem("agent.interpreter", "want a command or a path without blanks or options", name)
        return
    version = re.fullmatch(r"python(\d+\.\d+)", name.rsplit("/", 1)[-1])
    if version and version[1] != s.agent.python:
        message = f"is not the version in `agent.python` ({s.agent.python}), and the bundle has wheels only for that"
        yield problem("agent.interpreter", message, name)


def callers_once(s: Settings) -> Iterator[Problem]:
    yield from twice("reconcile.invokers", s.reconcile.invokers)
    yield from twice("submitters", s.submitters)
    yield from twice("ssh", s.ssh)
    for index, who in enumerate(s.submitters):
        if who in s.reconcile.invokers:
            yield problem(join("submitters", index), "is also in `reconcile.invokers`: remove it from that list", who)


def secrets_are_names(s: Settings) -> Iterator[Problem]:
    if s.secrets and not s.job_identity:
        yield Problem("secrets", "no job could read these secrets: set `job_identity`, the identity that reads them")
    yield from twice("secrets", s.secrets)


def job_files(s: Settings) -> Iterator[Problem]:
    for index, name in enumerate(s.jobs):
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not name:
            yield problem(join("jobs", index), "want a path inside the repository, relative to Pulumi.yaml", name)
        elif path.suffix not in (".yaml", ".yml") or not name.isprintable():
            yield problem(join("jobs", index), "want a job file, .yaml", name)
        elif path.parts[0] in UNWATCHED:
            yield problem(join("jobs", index), f"{NOT_WATCHED}: move the file", name)
    yield from twice("jobs", s.jobs)


def label_rules(s: Settings) -> Iterator[Problem]:
    most = (64 if s.cloud == "gcp" else 50) - OURS
    if len(s.labels) > most:
        told = f"a resource has at most {most + OURS} labels, of which Spotkeeper uses {OURS}"
        yield Problem("labels", f"{len(s.labels)} are too many: {told}")
    for key, value in s.labels.items():
        path = join("labels", key)
        if key.startswith("sk-"):
            yield problem(path, "sk-... labels are reserved for Spotkeeper", value)
        elif key.startswith("goog"):
            yield problem(path, "goog... labels are reserved for Google", value)
        elif not _LABEL_KEY.match(key):
            yield Problem(path, "want a key of lower-case letters, digits, - and _, at most 63 characters")
        elif not _LABEL_VALUE.match(value):
            yield problem(path, "want a value of lower-case letters, digits, - and _, at most 63 characters", value)


def production_bucket(s: Settings) -> Iterator[Problem]:
    if _is_production(s) and s.bucket.on_destroy == "delete":
        yield problem("bucket.on_destroy", _loses(s), "delete")


def _is_production(s: Settings) -> bool:
    return s.stack.startswith("prod") and not s.allow_data_loss


def _loses(s: Settings) -> str:
    return f"a destroy of {s.stack} would delete data: want retain or protect, or set `allow_data_loss: true`"


def addresses(s: Settings) -> Iterator[Problem]:
    for name in ("compute", "storage", "jwks", "issuer", "function"):
        value = getattr(s.endpoints, name)
        if value and not re.match(r"https?://[^/\s]+", value):
            yield problem(join("endpoints", name), "want an address, http(s)://...", value)
        elif value and not _SAFE.match(value):
            yield problem(join("endpoints", name), "http:// is only for localhost and 127.*: want https://...", value)


RULES: tuple[Rule, ...] = (
    stack_name, regions, home, warm_copies, zones_in_region, network_is_one, network_range, lease_spans_ticks,
    run_outlasts_boot,
    machine_cap, spend_cap, function_timeout, fallback_times, alerts.alarms, alerts.channels, alerts.budget_steps,
    interpreter, callers_once, secrets_are_names, job_files, label_rules, teams.teams, production_bucket, addresses,
)  # fmt: skip


# --- one pool; paths are relative to it --------------------------------------------------


def pool_name(pool: Pool, s: Settings) -> Iterator[Problem]:
    if not POOL_NAME.match(pool.name):
        yield problem("name", _NAME, pool.name)
    elif pool.name in (other.name for other in takewhile(lambda other: other is not pool, s.pools)):
        yield problem("name", "another pool has this name", pool.name)


def pool_zones(pool: Pool, s: Settings) -> Iterator[Problem]:
    in_region = _known_zones(s)
    if pool.kind == "static" and not pool.zones:
        yield Problem("zones", "missing: a static pool must name zones, since its disks cannot move")
    if not in_region or pool.zones == s.zones:
        return  # other rules report wrong regions and the stack's own zones
    allowed = s.zones if set(s.zones) <= set(in_region) else in_region
    for index, zone in enumerate(pool.zones):
        if zone not in in_region:
            yield problem(join("zones", index), f"is not a zone of {_where(s)}", zone, nearest(zone, in_region))
        else:
            yield from _zone(join("zones", index), zone, pool.zones[:index], allowed, "one of the stack's zones")


def pool_prices(pool: Pool, s: Settings) -> Iterator[Problem]:
    for zone in pool.prices:
        if zone not in pool.zones:
            yield Problem(join("prices", zone), "is not a zone of this pool", hint=nearest(zone, pool.zones))
    kind, listed = pool.machine.type, _PRICES[s.cloud]

    def wrong(how: str, remedy: str = "") -> Problem:
        message = f"{how}, which has {choices(kind, listed)}{remedy}"
        return problem("machine.type", message, kind, nearest(kind, listed))

    if not _MACHINE[s.cloud].match(kind):
        yield wrong(f"is not a machine type of {s.cloud}: see infra/catalog.py")
        return
    unknown = "is not in infra/catalog.py"
    if pool.zones and not pool.prices and pool.price(pool.zones[0]) is None:
        if kind not in listed:
            yield wrong(unknown, ": use another type, or set its prices by zone (`prices`)")
        return  # an unknown accelerator is reported by another rule
    if without := [zone for zone in pool.zones if pool.price(zone) is None]:
        yield wrong(unknown, f": use another type, or set `prices` for {', '.join(without)} too")
    for zone in pool.zones:
        price = pool.price(zone)
        if price is None:
            continue  # reported above, once
        if pool.kind == "spot" and price.spot is None:
            yield Problem(join(join("prices", zone), "spot"), "missing: a spot pool needs a spot price")
        elif price.spot is not None and price.spot > price.on_demand:
            yield problem(join(join("prices", zone), "spot"), "is above the on-demand price", price.spot)


def pool_kind(pool: Pool, s: Settings) -> Iterator[Problem]:
    if pool.kind == "spot":
        if pool.disk.on_destroy != "delete":
            message = "only a static pool's disks can outlive the stack: a destroy deletes the disks of nodes"
            yield problem("disk.on_destroy", message, pool.disk.on_destroy)
        if pool.max_on_demand is not None and pool.max_on_demand > pool.size:
            yield problem("max_on_demand", f"is above size ({pool.size})", pool.max_on_demand)
        return
    for name, why in (
        ("max_on_demand", "static machines are on-demand"),
        ("notice_s", "static machines are not preempted"),
        ("max_run_hours", "static machines are always on"),
    ):
        if (value := getattr(pool, name)) is not None:
            yield problem(name, f"only spot pools have this key: {why}", value)
    if len(pool.zones) > pool.size:
        yield problem("zones", f"has more zones than machines ({pool.size})", list(pool.zones))
    if _is_production(s) and pool.disk.on_destroy == "delete":
        yield problem("disk.on_destroy", _loses(s), "delete")


def pool_placement(pool: Pool, s: Settings) -> Iterator[Problem]:
    placement = pool.placement
    if placement is None:
        return
    if placement.max_distance is not None and placement.strategy == "spread":
        yield problem("placement.max_distance", "spread placement has no distance", placement.max_distance)
    if pool.kind == "static" and placement.strategy != "spread" and len(pool.zones) > 1:
        yield problem("zones", "a static pool with this placement can have only one zone", list(pool.zones))


def pool_run(pool: Pool, s: Settings) -> Iterator[Problem]:
    hours = pool.max_run_hours
    if hours is not None and hours != s.limits.max_run_hours and hours * 3600 < 2 * s.boot_deadline_s():
        yield problem("max_run_hours", _OVER_BEFORE, hours)


POOL_RULES: tuple[PoolRule, ...] = (
    pool_name, pool_zones, pool_prices, pool_kind, pool_placement, pool_run, pool_reservations,
)  # fmt: skip
