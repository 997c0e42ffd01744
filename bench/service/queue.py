"""A month of 200 jobs of 20 teams on a recorded market: the real scheduler, beside FIFO and backfill.

Jobs of 1 to 64 machines, none above an eighth of the cap of 512, want 1.3 times what it can do. FIFO serves jobs in the
order of submission. Backfill orders them by priority, use and age, knows how long each still runs, and lets a
job pass others only if that delays none of them (as Slurm's, with exact lengths). Neither takes machines from a job.
"""

from __future__ import annotations

import random
import sys
import time

from msgspec.structs import replace

from bench.service._queue_world import (
    BOOT,
    CAP,
    LEAVE,
    MINUTE_S,
    Month,
    World,
    jobs,
    offers,
    stack,
)
from spotkeeper.contract.allocation import Allocation, Claim, Grant, Stop
from spotkeeper.contract.stack import StackState
from spotkeeper.reconcile.decide.queue.order import Order
from spotkeeper.reconcile.decide.queue.scheduler import schedule

SEED = 1
POLL_S = 60.0  # a tick at the latest
BOUND_S = POLL_S + (LEAVE + BOOT) * MINUTE_S
PROTECTED_S = 900.0
WAITING, RUNNING = 1_000, 500


def figures() -> list[dict[str, object]]:
    month, fifo, backfill = (simulated(policy) for policy in (schedule, first_come, backfilled))
    over = f"200 jobs, 20 teams, 30 days, seed {SEED}; FIFO {{:.3g}}, backfill with exact lengths {{:.3g}}"

    def beside(value: str) -> str:
        return over.format(getattr(fifo, value), getattr(backfill, value))

    full, granted = round_ms(grant=False), round_ms(grant=True)
    waits = f"p95 of {len(month.waits_s)} high jobs, from submission to training; " + beside("high_wait_s")
    bound_s = BOUND_S + PROTECTED_S
    recalls = (
        f"{month.recalls} recalls, {month.finished} jobs finished (FIFO {fifo.finished}, backfill {backfill.finished})"
    )
    return [
        _figure("queue.jain", month.jain, "", ">= 0.95", month.jain >= 0.95, beside("jain")),
        _figure(
            "queue.utilisation", month.utilisation, "", ">= 0.95", month.utilisation >= 0.95, beside("utilisation")
        ),
        _figure("queue.high_wait_s", month.high_wait_s, "s", f"<= {bound_s:.0f}", month.high_wait_s <= bound_s, waits),
        _figure("queue.steps_lost", month.lost_min, "minutes of training", "0", month.lost_min == 0, recalls),
        _figure(
            "queue.round_ms_1000_waiting",
            max(full, granted),
            "ms",
            "<= 50",
            max(full, granted) <= 50,
            f"500 jobs run: {full:.0f} ms while nothing changes, {granted:.0f} ms with a grant",
        ),
    ]


def _figure(name: str, value: float, unit: str, goal: str, holds: bool, against: str) -> dict[str, object]:
    return {"name": name, "value": round(value, 4), "unit": unit, "goal": goal, "holds": holds, "against": against}


def simulated(policy: object, scale: float | None = None, seed: int = SEED) -> Month:
    offered = offers() if scale is None else offers(scale)
    return World(policy, jobs(seed), offered, seed).run()  # type: ignore[arg-type]


# -- without reclaim


def first_come(allocation: Allocation, _stack: StackState, now: float) -> Allocation:
    """Serve jobs in the order of their submission; the first that does not fit holds up all others."""
    free, changed = CAP - sum(claim.reserved for claim in allocation.claims), dict[str, Claim]()
    for claim in sorted((claim for claim in allocation.claims if claim.waiting), key=lambda claim: claim.since):
        if claim.min > free:
            break
        changed[claim.job] = _start(claim, min(free, claim.max), now)
        free -= changed[claim.job].reserved
    return _with(allocation, changed)


def backfilled(allocation: Allocation, stack_: StackState, now: float) -> Allocation:
    """Serve jobs in the queue's order; one passes the first that does not fit only if it does not delay it."""
    free, changed = CAP - sum(claim.reserved for claim in allocation.claims), dict[str, Claim]()
    shadow_s, spare = None, 0
    for claim in list(Order(allocation, stack_, now).charged()):
        if claim.min > free:
            if shadow_s is None:
                shadow_s, spare = _shadow(allocation, changed, claim, free)
            continue
        count = min(free, claim.max)
        lasts_s = claim.cost_s * claim.max / count
        if shadow_s is not None and now + lasts_s > shadow_s:
            if claim.min > spare:
                continue
            count = min(count, spare)
            spare -= count
        changed[claim.job] = _start(claim, count, now)
        free -= count
    return _with(allocation, changed)


def _shadow(allocation: Allocation, changed: dict[str, Claim], head: Claim, free: int) -> tuple[float, int]:
    """Return when the head can start, and how many machines it leaves then."""
    running = [changed.get(claim.job, claim) for claim in allocation.claims]
    for claim in sorted((claim for claim in running if claim.reserved), key=lambda claim: claim.ends or 0.0):
        free += claim.reserved
        if free >= head.min:
            return claim.ends or 0.0, free - head.min
    return float("inf"), 0


def _start(claim: Claim, count: int, now: float) -> Claim:
    ends = now + claim.cost_s * claim.max / count
    return replace(
        claim, reserved=count, reserved_at=now, waits=None, waited_s=now - claim.since, started=None, ends=ends
    )


def _with(allocation: Allocation, changed: dict[str, Claim]) -> Allocation:
    return replace(allocation, claims=tuple(changed.get(claim.job, claim) for claim in allocation.claims))


# -- the time of one round


def round_ms(grant: bool) -> float:
    """Return the processor time of one schedule of a full stack with 1,000 waiting jobs; ``grant``: a job has ended."""
    allocation, on, now = crowd()
    for _ in range(20):  # until no reservation changes any more: what is left waits for time or for an end
        allocation, last = schedule(allocation, on, now), allocation
        if allocation is last:
            break
    if grant:
        gone = next(claim.job for claim in allocation.claims if claim.reserved)
        claims = tuple(claim for claim in allocation.claims if claim.job != gone)
        held = tuple(one for one in allocation.grants if one.job != gone)
        allocation = replace(allocation, claims=claims, grants=held)
    took = []
    for _ in range(5):
        began = time.process_time()
        schedule(allocation, on, now)
        took.append(1000 * (time.process_time() - began))
    return min(took)


def crowd() -> tuple[Allocation, StackState, float]:
    draw, now = random.Random(1), 1_800_000_000.0  # noqa: S311
    claims, held = [], []
    for number in range(RUNNING + WAITING):
        size, at = draw.choice((1, 2, 4, 8, 16)), now - draw.uniform(0, 86_400)
        claim = Claim(
            f"j{number:04}", size, size, at, team=f"t{draw.randrange(20):02}", priority=draw.choice((0, 1, 1, 2))
        )
        if number >= RUNNING:
            claims.append(replace(claim, min=size * 4, max=size * 4, waits=at))
            continue
        stop = draw.choice((Stop.SAVED, Stop.SAVED, Stop.EARLY))
        claims.append(replace(claim, reserved=size, reserved_at=at, started=at, stop=stop, cost_s=300.0 * size))
        held += [Grant(claim.job, node, 1, "slot:h100", at) for node in range(size)]
    on = stack(cap=len(held))
    return Allocation(grants=tuple(held), claims=tuple(claims)), on, now


if __name__ == "__main__":
    for figure in figures():
        sys.stdout.write(f"{figure}\n")
