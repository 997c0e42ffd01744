"""``stack/allocation``: which job may have machines, and which attempt has one. Pure.

It holds the jobs' claims (the queue, and how many machines are reserved for whom), the grants, and what each team has
used. A claim's reservation comes first; then a grant permits one attempt to have a machine. A grant is written before
the intent. It is released after the machine is gone, or after the static machine has reported that it dropped the
attempt. By compare-and-swap only one writer succeeds, so two jobs never get the same machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from spotkeeper.contract.cloud import Offer
from spotkeeper.contract.record import Past, Until
from spotkeeper.contract.stack import Model, StackState, TeamState

Machines = Annotated[int, Meta(ge=0, le=10_000)]
Usd = Annotated[float, Meta(ge=0, le=1e12)]
RESERVED = f"/{Model.RESERVED.value}/"


class Grant(Struct, frozen=True, omit_defaults=True, gc=False):
    """An entry of the allocation: permits this attempt to have a machine of this ``resource``.

    ``resource`` is ``slot:<pool>`` for a spot machine under the pool's limit,
    ``slot:<pool>/on-demand`` for an on-demand machine and ``slot:<pool>/reserved/<key>``
    for one in this reserved capacity (both also count under the pool's limit), or
    ``machine:<name>`` for a static machine.
    """

    job: str
    node: int
    attempt: int
    resource: str
    since: float = 0.0
    zone: str = ""  # of the only intent that may use it, if it is for a dynamic machine; "": unknown

    @classmethod
    def of(cls, job: str, node: int, attempt: int, offer: Offer, since: float) -> Grant:
        zone = "" if offer.machine is not None else offer.zone
        return cls(job, node, attempt, resource(offer), since, zone)

    @property
    def machine(self) -> str | None:
        """The static machine's name; None for a dynamic machine."""
        return self.resource.removeprefix("machine:") if self.resource.startswith("machine:") else None

    @property
    def pool(self) -> str | None:
        """The pool of a dynamic machine; None for a static one."""
        if not self.resource.startswith("slot:"):
            return None
        return self.resource.removeprefix("slot:").partition("/")[0]

    @property
    def on_demand(self) -> bool:
        return self.resource.endswith("/on-demand")

    @property
    def reservation(self) -> str | None:
        """The key of the reserved capacity that the machine uses; None: none."""
        _, found, key = self.resource.partition(RESERVED)
        return key if found and self.machine is None else None


class Stop(str, Enum):
    """What it would cost to take all machines of a job now.

    ====== ============================================================================================
    SAVED  the job would save, and lose no step
    EARLY  it has no commit yet: taking its machines within ``queue.EARLY_S`` of its start would lose work
    NEVER  it would lose work: its script saves by itself (``stop: signal``), or has passed its last step
    ====== ============================================================================================
    """

    SAVED = "saved"
    EARLY = "early"
    NEVER = "never"


class Short(Struct, frozen=True, gc=False):
    """What a job with a reservation asks for in vain: the cloud refuses its machines.

    ``count``: its nodes without a machine; the others may still boot. ``offers``: ``pool/zone`` that it would take.
    """

    since: Past
    count: Machines
    offers: tuple[str, ...]


class Claim(Struct, frozen=True, omit_defaults=True, gc=False):
    """A job's claim to machines: what it asks for, and how many machines are reserved for it.

    A job without machines waits for a reservation, in the queue's order (``reconcile/decide/queue``). What a job's own
    round knows of it (``stop``, ``cost_s``, ``ends``, ``dry_since``, ``zone``) is brought up to date while another job
    waits, in the queue or for the market.
    All times are virtual unix seconds.
    """

    job: str
    min: Machines  # 0: the job wants none, but has not given back all its grants, or is a trial that waits at a rung
    max: Machines
    since: float  # when the job was submitted
    team: str = "default"
    priority: Annotated[int, Meta(ge=0, le=2)] = 1  # 0: low, 1: normal, 2: high
    pools: tuple[str, ...] = ()  # that may have its machines; empty: every pool
    mix: tuple[tuple[str, Machines], ...] = ()  # how many machines each of its pools must have; empty: any number
    on_demand: bool = False  # whether its dynamic machines are all on-demand
    waits: Past | None = None  # since when it waits; None: it has a reservation, or wants none
    waited_s: float = 0.0  # how long it had waited when it got its reservation
    reserved: Machines = 0  # machines that are reserved for it
    reserved_at: Past = 0.0  # when ``reserved`` last rose
    started: Past | None = None  # when it began to train with this reservation
    stop: Stop = Stop.EARLY
    cost_s: float = 0.0  # machine-seconds that a save, a new start and a lost spot machine would cost
    ends: Until | None = None  # when it is expected to end; None: unknown
    ending: Past | None = None  # since when it has been about to end, or past its last step, with this reservation
    dry_since: Past | None = None  # since when the market has no machine for it
    usd: Usd = 0.0  # list price an hour of the cheapest machine that it would take, if its team has such a limit
    zone: str = ""  # the zone of all of its machines; "": unknown, or several
    short: Short | None = None  # the machines that the cloud refuses; None: none
    took: Past = 0.0  # when it last took over machines of others because the cloud refused its own
    lapsed: Past = 0.0  # when it last lost a reservation that it could not use
    recalls: tuple[Past, ...] = ()  # when machines were taken from it within the last day, oldest first
    barred: tuple[str, ...] = ()  # jobs of the same class that took its machines: it takes none from them
    gap: str = ""  # the waiting job in front of which this one runs; that job may take the room back
    sweep: str = ""  # the search of which it is a trial
    parallel: Annotated[int, Meta(ge=0)] = 0  # most trials of that search that have machines
    whom: str = ""  # the job for which its machines were taken
    name: str = ""  # the job's, for users; "": unknown

    @property
    def waiting(self) -> bool:
        return not self.reserved and self.waits is not None

    @property
    def rests(self) -> bool:
        """Whether it is of a trial that wants no machines, as it waits for others of its search, or has ended."""
        return not self.max and bool(self.sweep)


class TeamUse(Struct, frozen=True, omit_defaults=True, gc=False):
    """What a team's released grants have cost at list prices, USD."""

    team: str
    usd: Usd = 0.0  # halves every ``queue.HALF_LIFE_S``
    at: Past = 0.0  # to which time ``usd`` has been decayed
    month: str = ""  # "2026-11", UTC
    month_usd: Usd = 0.0  # within that month, not decayed
    last_month: str = ""  # the month before; it is the present one again if a clock was ahead
    last_usd: Usd = 0.0


class Allocation(Struct, frozen=True, omit_defaults=True):
    """The document of all claims and grants, written by compare-and-swap."""

    ver: int = 0
    nonce: str = ""
    grants: tuple[Grant, ...] = ()
    claims: tuple[Claim, ...] = ()
    use: tuple[TeamUse, ...] = ()
    home: str = ""  # in several regions: the region whose function works for the stack; "": none has begun

    def claim(self, job: str) -> Claim | None:
        return next((claim for claim in self.claims if claim.job == job), None)

    def name(self, job: str) -> str:
        """Return the job's name; its id if it has no claim, since it has ended or runs alone."""
        claim = self.claim(job)
        return (claim.name if claim is not None else "") or job

    def changed(self, add: Iterable[Grant], drop: Iterable[Grant]) -> Allocation:
        """Return the next version with these changes of grants; the writer sets its nonce."""
        gone = {(grant.job, grant.node, grant.attempt) for grant in drop}
        kept = tuple(grant for grant in self.grants if (grant.job, grant.node, grant.attempt) not in gone)
        return replace(self, ver=self.ver + 1, grants=(*kept, *add))


def resource(offer: Offer) -> str:
    if offer.machine is not None:
        return f"machine:{offer.machine}"
    if offer.model is Model.RESERVED:
        return f"slot:{offer.pool}{RESERVED}{offer.zone}/{offer.reservation or ''}"
    return f"slot:{offer.pool}" + ("/on-demand" if offer.model is Model.ON_DEMAND else "")


def list_price(stack: StackState, resource: str) -> float:
    """Return a machine's list price in the most expensive zone, USD per hour; 0 if unknown.

    A team's use of static machines and of reserved capacity counts like that of on-demand machines, although both are
    paid for already: otherwise a team that has them all would seem to use nothing.
    """
    grant = Grant("", 0, 0, resource)
    if grant.machine is not None:
        pools = (pool for pool in stack.pools if any(one.name == grant.machine for one in pool.machines))
        return next((pool.dearest(Model.STATIC) for pool in pools), 0.0)
    pool = stack.pool(grant.pool or "")
    dear = grant.on_demand or grant.reservation is not None
    return 0.0 if pool is None else pool.dearest(Model.ON_DEMAND if dear else Model.SPOT)


class Tally:
    """Counts of grants by resource and pool. Counting anew for each check would be slow with 10,000 nodes.

    ``reserved``: machines by pool that are reserved for other jobs and not granted yet: their room is taken as well.
    ``team``: whose limits count too; ``jobs``, all jobs of this team; ``team_usd``, USD an hour that its other jobs'
    reserved machines will cost.
    """

    def __init__(
        self,
        grants: Iterable[Grant],
        reserved: Mapping[str, int] | None = None,
        team: TeamState | None = None,
        jobs: Collection[str] = (),
        team_usd: float = 0.0,
    ) -> None:
        self._team, self._jobs, self._team_usd = team, jobs, team_usd
        self._of_team: Counter[str] = Counter()  # the team's machines by resource
        self._resources: Counter[str] = Counter()
        self._pools: Counter[str | None] = Counter()
        self._reserved = reserved or {}
        for grant in grants:
            self.add(grant)

    def add(self, grant: Grant) -> None:
        self._resources[grant.resource] += 1
        self._pools[grant.pool] += 1
        if grant.job in self._jobs:
            self._of_team[grant.resource] += 1

    def fits(self, stack: StackState, offer: Offer, later_usd: float = 0.0) -> bool:
        """Whether the stack's and the team's limits allow one more machine of this offer.

        ``later_usd``: USD an hour of the team that are kept for further machines of the job.
        """
        taken = self._resources[resource(offer)]
        if self._team is not None and not self._under_the_teams(stack, self._team, resource(offer), later_usd):
            return False
        if offer.machine is not None:
            return not taken
        pool = stack.pool(offer.pool)
        if pool is None or (offer.model is Model.ON_DEMAND and taken >= pool.max_on_demand):
            return False
        if self.used_up(stack, offer):
            return False
        in_pool = self._pools[offer.pool] + self._reserved.get(offer.pool, 0)
        return in_pool < pool.max_machines and self._under_the_stacks(stack, pool.dearest(offer.model))

    def used_up(self, stack: StackState, offer: Offer, less: int = 0) -> bool:
        """Whether the offer is one of reserved capacity that has no idle machine, or is no longer in the stack file.

        ``less``: how many of its machines not to count.
        """
        if offer.model is not Model.RESERVED:
            return False
        pool = stack.pool(offer.pool)
        found = pool.reservation(offer.zone, offer.reservation) if pool is not None else None
        return found is None or self._resources[resource(offer)] - less >= found.count

    def _under_the_teams(self, stack: StackState, team: TeamState, new: str, later_usd: float) -> bool:
        """Whether the team's machines, and one more of this resource, stay within the team's limits."""
        if team.max_machines is not None and self._of_team.total() >= team.max_machines:
            return False
        if team.max_usd_hour is None:
            return True
        usd = sum(count * list_price(stack, of) for of, count in self._of_team.items()) + list_price(stack, new)
        return usd + self._team_usd + later_usd <= team.max_usd_hour + 1e-9

    def _under_the_stacks(self, stack: StackState, usd: float) -> bool:
        """Whether all dynamic machines, and one more at ``usd`` an hour, stay within the stack's own limits."""
        if stack.max_machines is not None:
            taken = sum(count for name, count in self._pools.items() if name is not None)
            taken += sum(self._reserved.get(pool.name, 0) for pool in stack.pools if pool.kind != "static")
            if taken >= stack.max_machines:
                return False
        if stack.max_usd_hour is None:
            return True
        for pool in stack.pools:
            spot = self._resources[f"slot:{pool.name}"] + self._reserved.get(pool.name, 0)
            usd += spot * pool.dearest(Model.SPOT)
            usd += self._resources[f"slot:{pool.name}/on-demand"] * pool.dearest(Model.ON_DEMAND)
        return usd <= stack.max_usd_hour + 1e-9  # in floating point, 3 x 1.2 is more than 3.6
