"""What the limits of the stack and of its teams have room for. Pure.

A reservation names no pool, since the market decides later which pool has machines. So a claim is placed: its machines
are spread over the pools that it may use. First come the pools of its grants, then idle static machines, then the stack
file's order; a mix has its number of machines in each of its pools. Machines that leave (recalled, superseded, or extra
for a replacement) count as gone. The limits that the cloud's machines must keep at every moment are checked once more
at each grant (``allocation.Tally``).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from spotkeeper.contract.allocation import Allocation, Claim, Stop
from spotkeeper.contract.stack import Model, PoolState, StackState

EPSILON = 1e-9  # in floating point, 3 x 1.2 is more than 3.6
Spread = tuple[tuple[str, int], ...]  # machines by pool, or by `<pool>/on-demand` where such are granted


class Room:
    """The room that reservations leave, by pool, and in the limits of stack and teams. Copy it to try something."""

    def __init__(self, stack: StackState, over: Mapping[str, str] | None = None, now: float = 0.0) -> None:
        """``over``: teams that may start nothing, and why (their money of this month is spent).

        ``now``: reserved capacity that no machine can use then has no machine that is paid for already.
        """
        self._stack = stack
        self._over = over or {}
        self._pools = sorted(stack.pools, key=lambda pool: pool.kind != "static")
        self._named = {pool.name: pool for pool in stack.pools}
        self._prices = {(pool.name, dear): _price(pool, dear) for pool in stack.pools for dear in (False, True)}
        self._teams = {team.name: team for team in stack.teams}
        self._kinds: dict[tuple[tuple[str, ...], bool, bool], tuple[list[PoolState], float]] = {}
        self._left = {pool.name: _size(pool) for pool in stack.pools}
        self._on_demand = {pool.name: pool.max_on_demand for pool in stack.pools}
        self._machines: Counter[str] = Counter()  # dynamic machines in all, and all machines by team
        self._usd: dict[str, float] = defaultdict(float)  # USD per hour: in all, less what is prepaid, and by team
        self._usd[""] = -sum(
            one.count * self._prices[pool.name, False]
            for pool in stack.pools
            for one in pool.reservations
            if one.usable(now)
        )
        self._placed: dict[str, tuple[Claim, Spread]] = {}
        self._trials: Counter[str] = Counter()  # trials with machines, by search
        self._leaving: set[str] = set()  # of them, those whose machines are being deleted

    def copy(self) -> Room:
        new = object.__new__(Room)
        new.__dict__.update(self.__dict__)
        for name in ("_left", "_on_demand", "_machines", "_usd", "_placed", "_trials"):
            setattr(new, name, getattr(self, name).copy())
        return new

    def fits(self, claim: Claim, count: int) -> bool:
        """Whether ``count`` more machines of this claim fit into the pools and the limits of stack and team."""
        return not self.limit(claim, count) and self._spread(claim, count) is not None

    def most(self, claim: Claim, least: int, most: int) -> int:
        """Return how many more machines fit: between ``least``, which fit already, and ``most``."""
        return next((count for count in range(most, least, -1) if self.fits(claim, count)), least)

    def limit(self, claim: Claim, count: int) -> str:
        """Return which limit of its team or search keeps this claim from ``count`` more machines; "" if none does."""
        others = self._trials[claim.sweep] - (claim.job in self._leaving)
        if claim.sweep and not self.placed(claim.job) and others >= claim.parallel:
            trials = f"{claim.parallel} trial{'' if claim.parallel == 1 else 's'}"
            return f"search {claim.sweep} has {trials} at work, as many as its `parallel` allows"
        if why := self._over.get(claim.team):
            return why
        team = self._teams.get(claim.team)
        if team is None:
            return ""
        if team.max_machines is not None and self._machines["/" + team.name] + count > team.max_machines:
            return f"team {team.name} is at its max_machines of {team.max_machines}"
        most = math.inf if team.max_usd_hour is None else team.max_usd_hour
        if most < math.inf and self._usd["/" + team.name] + self._cost(claim, count) > most + EPSILON:
            return f"team {team.name} is at its max_usd_per_hour of ${most:g}"
        return ""

    def impossible(self, claim: Claim) -> str:
        """Return which limit a claim exceeds that does not fit into this empty room, its value, and what to change."""
        wants, pools = f"the job wants {claim.min} machine{'' if claim.min == 1 else 's'}", self._kind(claim)[0]
        remedy = "submit it with fewer, or raise this limit in the stack file"
        names = ", ".join(pool.name for pool in pools) or "no pool"
        most = sum(self._left[pool.name] for pool in pools)
        paid = sum(self._on_demand[one.name] if one.kind != "static" else self._left[one.name] for one in pools)
        small = next(((name, n) for name, n in self._lacks(claim).items() if n > self._left[name]), None)
        if told := self.limit(claim, claim.min):
            return f"{wants}, and {told}: {remedy}"
        if small is not None:
            name, number = small
            return f"the job wants {number} machines of pool {name}, and its `size` is {self._left[name]}: {remedy}"
        if claim.min > most:
            return f"{wants}, and its pools ({names}) have {most} in all (`size`): {remedy}"
        if claim.on_demand and claim.min > paid:
            return f"{wants}, and its pools ({names}) may have {paid} on demand (`max_on_demand`): {remedy}"
        machines, usd = self._stack.max_machines, self._stack.max_usd_hour
        static = sum(self._left[pool.name] for pool in pools if pool.kind == "static")
        if machines is not None and claim.min - static > machines:
            return f"{wants}, and the stack may have {machines} (`limits.machines`): {remedy}"
        return f"{wants}, and the stack may spend ${usd or 0.0:g} an hour (`limits.usd_per_hour`): {remedy}"

    def _cost(self, claim: Claim, count: int) -> float:
        """Return what ``count`` machines cost at least, USD per hour, in the cheapest pools or by its round."""
        spread = self._spread(claim, count) or self._beyond(claim, count)
        return max(count * claim.usd, sum(number * self._prices[name, claim.on_demand] for name, number in spread))

    def usd(self, claim: Claim) -> float:
        """Return the list price of one of the claim's machines, USD per hour, in the dearest of its pools."""
        return self._kind(claim)[1]

    def place(self, claim: Claim, count: int) -> None:
        """Place ``count`` more machines, even beyond limits lowered since."""
        self.take(claim, self._spread(claim, count) or self._beyond(claim, count))

    def keep(self, claim: Claim, granted: Mapping[str, int]) -> int:
        """Place the machines that are granted already, by pool; return how many reserved ones are left to place."""
        count = claim.reserved
        for name, number in granted.items():
            most = min(count, self._lacks(claim)[_pool(name)]) if claim.mix else count
            if _pool(name) in self._named and most:
                self._take(claim, name, min(most, number))
                count -= min(most, number)
        return count

    def free(self, job: str, count: int) -> Spread:
        """Free the last ``count`` machines placed for this job; return their pools."""
        claim, spread = self._placed.get(job, (None, ()))
        freed: list[tuple[str, int]] = []
        for name, number in reversed(spread):
            if claim is not None and (gone := min(count, number)):
                self._take(claim, name, -gone)
                freed.append((name, gone))
                count -= gone
        return tuple(freed)

    def take(self, claim: Claim, spread: Spread, sign: int = 1) -> None:
        """Place these machines, or free them with a ``sign`` of -1."""
        for name, number in spread:
            self._take(claim, name, sign * number)

    def count_leaving(self, claim: Claim) -> None:
        """Count a trial whose machines are still being deleted: it uses no room, but one of its search's `parallel`."""
        self._leaving.add(claim.job)
        self._trials[claim.sweep] += 1

    def placed(self, job: str) -> Spread:
        return self._placed[job][1] if job in self._placed else ()

    def over(self, job: str) -> bool:
        """Whether the pools of this job's machines, or the stack, have more machines or cost more than they may."""
        stack, pools = self._stack, {_pool(name) for name, _ in self.placed(job)}
        machines = stack.max_machines is not None and self._machines[""] > stack.max_machines
        usd = stack.max_usd_hour is not None and self._usd[""] > stack.max_usd_hour + EPSILON
        dynamic = any(self._named[name].kind != "static" for name in pools)
        return any(self._left[name] < 0 for name in pools) or (dynamic and (machines or usd))

    # -- placing

    def _kind(self, claim: Claim) -> tuple[list[PoolState], float]:
        """Return the pools that this claim may use, and the price of a machine in the dearest of them.

        A team whose USD an hour are limited uses the cheapest first.
        """
        team = self._teams.get(claim.team)
        kind = claim.pools, claim.on_demand, team is not None and team.max_usd_hour is not None
        if kind not in self._kinds:
            pools = [pool for pool in self._pools if not claim.pools or pool.name in claim.pools]
            if kind[2]:
                pools.sort(key=lambda pool: self._prices[pool.name, claim.on_demand])
            usd = max((self._prices[pool.name, claim.on_demand] for pool in pools), default=0.0)
            self._kinds[kind] = pools, usd
        return self._kinds[kind]

    def _spread(self, claim: Claim, count: int) -> Spread | None:
        """Return the pools that have room for ``count`` more machines of this claim; None if they do not."""
        left, found = count, []
        mix = self._lacks(claim) if claim.mix else None
        stack = self._stack
        dynamic = 10**9 if stack.max_machines is None else stack.max_machines - self._machines[""]
        usd = math.inf if stack.max_usd_hour is None else stack.max_usd_hour - self._usd[""] + EPSILON
        for pool in self._kind(claim)[0]:
            number = min(left, self._left[pool.name] if mix is None else min(mix[pool.name], self._left[pool.name]))
            if pool.kind != "static":
                price = self._prices[pool.name, claim.on_demand]
                number = min(number, dynamic, self._on_demand[pool.name] if claim.on_demand else number)
                number = max(0, min(number, int(usd / price)) if price and usd < math.inf else number)
                dynamic, usd = dynamic - number, usd - number * price
            if number > 0:
                found.append((pool.name, number))
                left -= number
        return None if left else tuple(found)

    def _beyond(self, claim: Claim, count: int) -> Spread:
        """Return where ``count`` more machines of this claim would be if its pools had room."""
        if claim.mix:
            return tuple(self._lacks(claim).items())
        pools = self._kind(claim)[0]
        return ((pools[0].name, count),) if pools and count else ()

    def _lacks(self, claim: Claim) -> Counter[str]:
        """Return the machines of a mix that are not placed yet, by pool. A pool may have left the stack file."""
        lacks = Counter({name: number for name, number in claim.mix if name in self._named})
        for name, number in self.placed(claim.job):
            lacks[_pool(name)] -= number
        return +lacks

    def _take(self, claim: Claim, name: str, number: int) -> None:
        pool = self._named[_pool(name)]
        dear = claim.on_demand or name != pool.name
        self._left[pool.name] -= number
        if dear and pool.kind != "static":
            self._on_demand[pool.name] -= number
        for key in ("", "/" + claim.team):
            if key or pool.kind != "static":
                self._machines[key] += number
                self._usd[key] += number * self._prices[pool.name, dear]
        _, spread = self._placed.get(claim.job, (claim, ()))
        leaves = claim.job in self._leaving
        self._trials[claim.sweep] -= bool(spread) or leaves
        counts = Counter(dict(spread))
        counts[name] += number
        self._placed[claim.job] = claim, tuple((each, left) for each, left in counts.items() if left)
        self._trials[claim.sweep] += bool(self._placed[claim.job][1]) or leaves


def _pool(name: str) -> str:
    return name.partition("/")[0]


def _size(pool: PoolState) -> int:
    return len(pool.machines) if pool.kind == "static" else pool.max_machines


def _price(pool: PoolState, on_demand: bool) -> float:
    if pool.kind == "static":
        return pool.dearest(Model.STATIC)
    return pool.dearest(Model.ON_DEMAND if on_demand else Model.SPOT)


def of_running(
    allocation: Allocation, stack: StackState, over: Mapping[str, str] | None = None, now: float = 0.0
) -> Room:
    """Return the room that all reservations leave."""
    room, granted = Room(stack, over, now), granted_by(allocation, stack)
    claims = [claim for claim in (*allocation.claims, *unclaimed(allocation)) if claim.reserved]
    claims.sort(key=lambda claim: (not claim.mix, len(claim.pools) or len(stack.pools), claim.job))
    missing = [room.keep(claim, granted.get(claim.job, {})) for claim in claims]
    for claim, count in zip(claims, missing, strict=True):
        room.place(claim, count)
    there = {grant.job for grant in allocation.grants if grant.machine is None}
    for claim in allocation.claims:
        if claim.sweep and not claim.reserved and claim.job in there:
            room.count_leaving(claim)
    return room


def unclaimed(allocation: Allocation) -> tuple[Claim, ...]:
    """Return a claim for each job that has grants and no claim: an older version started it, or nobody else waited."""
    known = {claim.job for claim in allocation.claims}
    counts = Counter(grant.job for grant in allocation.grants if grant.job not in known)
    return tuple(
        Claim(job, min=count, max=count, since=0.0, reserved=count, stop=Stop.NEVER) for job, count in counts.items()
    )


def granted_by(allocation: Allocation, stack: StackState) -> Mapping[str, Counter[str]]:
    """Return each job's grants, counted by pool; on-demand machines as ``<pool>/on-demand``.

    Machines in reserved capacity count as the pool's spot machines, for which ``Room`` has subtracted their price.
    """
    pools = {f"machine:{one.name}": pool.name for pool in stack.pools for one in pool.machines}
    granted: dict[str, Counter[str]] = defaultdict(Counter)
    for grant in allocation.grants:
        if grant.resource not in pools:
            reserved = grant.reservation is not None
            pools[grant.resource] = (grant.pool or "") if reserved else grant.resource.removeprefix("slot:")
        granted[grant.job][pools[grant.resource]] += 1
    return granted


def reserved_elsewhere(allocation: Allocation, stack: StackState, job: str, now: float = 0.0) -> Counter[str]:
    """Return, by pool, the machines that are reserved for jobs other than this one and not granted yet."""
    missing: Counter[str] = Counter()
    for _, name, number in _missing(allocation, stack, job, now):
        missing[_pool(name)] += number
    return missing


def usd_elsewhere(allocation: Allocation, stack: StackState, job: str, team: str, now: float = 0.0) -> float:
    """Return what a team's machines that are reserved for other jobs and not granted yet will cost, USD per hour."""
    found = (one for one in _missing(allocation, stack, job, now) if one[0].team == team)
    return sum(number * _price(pool, claim.on_demand) for claim, name, number in found if (pool := stack.pool(name)))


def _missing(allocation: Allocation, stack: StackState, job: str, now: float) -> Iterator[tuple[Claim, str, int]]:
    granted = granted_by(allocation, stack)
    others = [claim for claim in allocation.claims if claim.job != job]
    if all(claim.reserved <= granted[claim.job].total() for claim in others):
        return
    room = of_running(allocation, stack, now=now)
    for claim in others:
        for name, number in room.placed(claim.job):
            if (lacks := number - granted[claim.job][name]) > 0:
                yield claim, name, lacks
