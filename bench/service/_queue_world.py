"""A month of jobs on one stack, minute by minute: a policy reserves machines, a recorded market offers them.

A job gets machines, all that it lacks at once, while grants leave room under the cap and the market offers them; it
trains ``BOOT`` minutes later. A job whose reservation falls trains on until it has saved, and gives machines back after
``LEAVE`` minutes. The market takes machines when it offers fewer than are in use. No step is lost with a machine, since
jobs save at the notice; a gang that waits for a replacement keeps its other machines for ``PATIENCE`` minutes.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from spotkeeper.contract.allocation import Allocation, Claim, Grant, Stop, TeamUse
from spotkeeper.contract.stack import PoolState, Price, StackState, TeamState
from spotkeeper.reconcile.decide.queue import use
from spotkeeper.reconcile.decide.queue.order import HIGH, rank
from spotkeeper.reconcile.decide.queue.scheduler import schedule
from spotkeeper.replay.recording import SHIPPED, read

CAP, TEAMS, JOBS, DAYS = 512, 20, 200, 30
LOAD = 1.3  # of the cap, by all jobs' work
SCALE = 8  # the recording's probes asked for 16 machines a zone at most; this makes the median offer 1.8 times the cap
MINUTE_S, DAY_MIN = 60.0, 1440
LEAVE, BOOT, PATIENCE = 2, 2, 15  # minutes: save, stop and deletion; boot; see above
COMMIT_S = 600.0  # after its start a job has its first checkpoint
BEGIN_S = 1_700_000_000.0

Policy = Callable[[Allocation, StackState, float], Allocation]


@dataclass
class Job:
    claim: Claim
    left_min: float  # training time with ``claim.max`` machines
    have: int = 0
    trains_at: float = 0.0  # when its newest machines have booted
    leaving: list[tuple[float, int]] = field(default_factory=list)  # (when, machines) that it gives back
    short_since: float | None = None
    waited_s: float | None = None  # from submission to its first step
    first_s: float | None = None  # its first step

    @property
    def stays(self) -> int:
        return self.have - sum(count for _, count in self.leaving)


@dataclass
class Month:
    """What came of a policy. Machine-minutes by team in ``used`` and ``entitled``."""

    used: Counter[str] = field(default_factory=Counter)
    entitled: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    busy: float = 0.0  # machine-minutes in use while a job waited
    offered: float = 0.0  # the lesser of cap and offer in the same minutes
    recalls: int = 0
    lost_min: float = 0.0  # training time that recalls cost, since a job had no commit
    waits_s: list[float] = field(default_factory=list)  # of high jobs
    finished: int = 0

    @property
    def utilisation(self) -> float:
        return self.busy / max(1.0, self.offered)

    @property
    def high_wait_s(self) -> float:
        return sorted(self.waits_s)[int(0.95 * len(self.waits_s))] if self.waits_s else float("inf")

    @property
    def jain(self) -> float:
        shares = [self.used[team] / due for team, due in self.entitled.items() if due]
        return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))


def stack(cap: int = CAP) -> StackState:
    price = {"a": Price(on_demand=88.0, spot=30.0)}
    pool = PoolState("h100", "spot", "a3-highgpu-8g", ("a",), 8, cap, 0, 100, "pd-ssd", price)
    teams = tuple(TeamState(f"t{number:02}") for number in range(TEAMS))
    return StackState("bench", "gcp", "p", "r", "b", (pool,), teams=teams)


def jobs(seed: int) -> list[Job]:
    """Draw a month's jobs: 12 % high, 25 % low, 30 % elastic; 1 to 64 machines."""
    draw = random.Random(seed)  # noqa: S311
    drawn = []
    for number in range(JOBS):
        size = round(2 ** draw.uniform(0, 6))
        least = max(1, size // 2) if draw.random() < 0.3 else size
        priority = draw.choices((0, 1, HIGH), (25, 63, 12))[0]
        since = BEGIN_S + draw.randrange(DAYS * DAY_MIN) * MINUTE_S
        team = f"t{draw.randrange(TEAMS):02}"
        claim = Claim(f"j{number:03}", least, size, since, team=team, priority=priority, waits=since)
        drawn.append(Job(claim, draw.lognormvariate(0, 0.7)))
    scale = LOAD * CAP * DAYS * DAY_MIN / sum(job.left_min * job.claim.max for job in drawn)
    for job in drawn:
        job.left_min *= scale
    return sorted(drawn, key=lambda job: job.claim.since)


def offers(scale: float = SCALE) -> list[int]:
    """Return how many machines all zones of the recording offer, minute by minute; it is repeated for a month."""
    recording = read(SHIPPED / "gcp-2025-10-h100.json")
    ticks = [round(scale * sum(zone.capacity[tick] for zone in recording.zones)) for tick in range(recording.ticks)]
    each = round(recording.tick_h * 60)
    return [ticks[(minute // each) % len(ticks)] for minute in range(DAYS * DAY_MIN)]


class World:
    def __init__(self, policy: Policy, drawn: Sequence[Job], offered: Sequence[int], seed: int) -> None:
        self.policy, self.offered, self.stack = policy, offered, stack()
        self.coming = list(drawn)
        self.jobs: dict[str, Job] = {}
        self.draw = random.Random(seed)  # noqa: S311
        self.use: tuple[TeamUse, ...] = ()
        self.month = Month()
        self.dirty = True
        self.grants: dict[str, list[Grant]] = {}

    def run(self) -> Month:
        for minute, offered in enumerate(self.offered):
            now = BEGIN_S + minute * MINUTE_S
            self._arrive(now)
            self._give_back(now)
            self._preempt(offered, now)
            waiting = [job for job in self.jobs.values() if job.claim.waiting]
            if self.dirty or (waiting and (minute % 10 == 0 or any(job.claim.priority == HIGH for job in waiting))):
                self._schedule(now)
            self._acquire(offered, now)
            self._train(now)
            self._count(offered, now)
        return self.month

    def _arrive(self, now: float) -> None:
        while self.coming and self.coming[0].claim.since <= now:
            job = self.coming.pop(0)
            self.jobs[job.claim.job] = job
            self.grants[job.claim.job] = []
            self.dirty = True

    def _give_back(self, now: float) -> None:
        for job in self.jobs.values():
            gone = sum(count for at, count in job.leaving if at <= now)
            if gone:
                job.leaving = [(at, count) for at, count in job.leaving if at > now]
                self._drop(job, gone, now)

    def _drop(self, job: Job, count: int, now: float) -> None:
        own = self.grants[job.claim.job]
        gone, self.grants[job.claim.job] = own[len(own) - count :], own[: len(own) - count]
        self.use = use.folded(self._allocation(), gone, self.stack, now)
        job.have -= count
        self.dirty = True

    def _preempt(self, offered: int, now: float) -> None:
        """Take machines away beyond what the market offers."""
        for _ in range(max(0, sum(job.have for job in self.jobs.values()) - offered)):
            held = [job for job in self.jobs.values() if job.stays]
            if not held:
                return
            self._drop(self.draw.choices(held, [job.stays for job in held])[0], 1, now)

    def _allocation(self) -> Allocation:
        grants = tuple(grant for own in self.grants.values() for grant in own)
        return Allocation(grants=grants, claims=tuple(job.claim for job in self.jobs.values()), use=self.use)

    def _schedule(self, now: float) -> None:
        self.dirty = False
        for job in self.jobs.values():
            job.claim = self._known(job, now)
        for claim in self.policy(self._allocation(), self.stack, now).claims:
            self._obey(self.jobs[claim.job], claim, now)

    def _known(self, job: Job, now: float) -> Claim:
        claim, trains = job.claim, self._trains(job, now)
        started = job.trains_at if claim.started is None and trains and job.trains_at >= claim.reserved_at else None
        saved = job.first_s is not None and now - job.first_s >= COMMIT_S
        ends = now + job.left_min * MINUTE_S * claim.max / claim.reserved if claim.reserved else None
        return replace(
            claim,
            started=claim.started or started,
            stop=Stop.SAVED if saved else Stop.EARLY,
            cost_s=self.cost_s(job),
            ends=ends,
            dry_since=None if job.have or not claim.reserved else job.short_since,
        )

    def cost_s(self, job: Job) -> float:
        """Return what a recall costs; for a policy without reclaim, how long the job trains with all its machines."""
        if self.policy is not schedule:
            return job.left_min * MINUTE_S
        return (LEAVE + BOOT) * MINUTE_S * (job.claim.reserved or job.claim.min)

    def _trains(self, job: Job, now: float) -> bool:
        return 0 < job.claim.reserved <= job.stays and not job.leaving and now >= job.trains_at

    def _obey(self, job: Job, claim: Claim, now: float) -> None:
        if claim.reserved < job.claim.reserved and len(claim.recalls) and claim.recalls[-1] == now:
            self.month.recalls += 1
            if job.first_s is not None and job.claim.stop is not Stop.SAVED:
                self.month.lost_min += (now - job.first_s) / MINUTE_S
        if job.stays > claim.reserved:
            job.leaving.append((now + LEAVE * MINUTE_S, job.stays - claim.reserved))
        job.claim = claim

    def _acquire(self, offered: int, now: float) -> None:
        used = sum(job.have for job in self.jobs.values())
        short = [job for job in self.jobs.values() if job.claim.reserved > job.stays]
        for job in sorted(short, key=lambda job: (job.claim.reserved_at, job.claim.job)):
            missing = job.claim.reserved - job.stays
            least = max(0, job.claim.min - job.stays)
            room = min(CAP, offered) - used
            if room >= max(least, 1):
                taken = min(room, missing)
                used += taken
                job.have += taken
                job.trains_at, job.short_since = now + BOOT * MINUTE_S, None
                self._grant(job, taken, now)
            elif job.short_since is None:
                job.short_since = now
            elif job.stays and job.stays < job.claim.min and now - job.short_since >= PATIENCE * MINUTE_S:
                job.leaving.append((now, job.stays))

    def _grant(self, job: Job, count: int, now: float) -> None:
        self.grants[job.claim.job] += [Grant(job.claim.job, at, 1, "slot:h100", now) for at in range(count)]

    def _train(self, now: float) -> None:
        for job in list(self.jobs.values()):
            if job.claim.reserved and job.claim.min <= job.stays and now >= job.trains_at and not job.leaving:
                if job.first_s is None:
                    job.first_s = now
                    job.waited_s = now - job.claim.since
                    if job.claim.priority == HIGH:
                        self.month.waits_s.append(job.waited_s)
                job.left_min -= min(job.stays, job.claim.max) / job.claim.max
                if job.left_min <= 0:
                    self._drop(job, job.have, now)
                    del self.jobs[job.claim.job], self.grants[job.claim.job]
                    self.month.finished += 1

    def _count(self, offered: int, now: float) -> None:
        month, there = self.month, self.jobs.values()
        demand = [(rank(job.claim, now), job.claim.team, job.claim.max) for job in there]
        for team, due in use.entitled(min(CAP, offered), demand, self.stack).items():
            month.entitled[team] += due
        for job in there:
            month.used[job.claim.team] += job.have
        if any(job.claim.waiting for job in there):
            idle = sum(job.stays for job in there if job.stays < job.claim.min)
            month.busy += sum(job.have for job in there) - idle
            month.offered += min(CAP, offered)
