"""What holds for every schedule, on random allocations."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import event, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from spotkeeper.contract.allocation import Allocation, Claim, Grant, Short, Stop, TeamUse
from spotkeeper.contract.stack import StackState, TeamState
from spotkeeper.reconcile.decide.queue import reclaim
from spotkeeper.reconcile.decide.queue.order import rank, reasons
from spotkeeper.reconcile.decide.queue.room import of_running
from spotkeeper.reconcile.decide.queue.scheduler import schedule
from tests.reconcile.decide.queue.situation import DAY_S, HOUR_S, NOW, pool, stack
from tests.sizes import size

TEAMS = ("a", "b", "c")
every = settings(max_examples=size(150, 20_000), deadline=None, derandomize=True)
seeds = st.integers(0, 10**9)


def a_claim(job: str, draw: Random) -> Claim:
    least, since = draw.randint(1, 5), NOW - 60.0 * draw.choice((5, 14, 16, 59, 61, 300, 3000))
    claim = Claim(
        job,
        least,
        least + draw.choice((0, 0, 0, 1, 3)),
        since=since,
        team=draw.choice(TEAMS),
        priority=draw.randint(0, 2),
        pools=draw.choice(((), (), ("p",), ("q",), ("p", "q"))),
        stop=draw.choice((Stop.SAVED, Stop.SAVED, Stop.SAVED, Stop.EARLY, Stop.NEVER)),
        cost_s=draw.randint(1, 9) * 100.0,
        ends=draw.choice((None, None, NOW + 300, NOW + DAY_S)),
        recalls=tuple(NOW - hours * HOUR_S for hours in draw.choice(((), (), (3,), (0.5, 0.2), (20, 9, 5)))),
        lapsed=draw.choice((0.0, 0.0, 0.0, NOW - 300)),
    )
    if draw.random() < 0.5:
        return replace(claim, waits=since, barred=draw.choice(((), ("r0", "r1"))))
    return replace(
        claim,
        reserved=draw.randint(least, claim.max),
        reserved_at=since,
        started=draw.choice((None, since, since)),
        waited_s=draw.choice((0.0, DAY_S)),
        dry_since=draw.choice((None, None, None, NOW - 1200)),
        zone=draw.choice(("a", "a", "b")),
        short=draw.choice((None, None, Short(NOW - 60.0 * draw.choice((5, 8, 20)), 1, ("p/a", "q/a")))),
        took=draw.choice((0.0, NOW - 600, NOW - HOUR_S)),
        gap=draw.choice(("", "", "r0", "r2")),
    )


def a_situation(seed: int) -> tuple[Allocation, StackState]:
    """Draw up to nine jobs in two pools, and limits; what is reserved before fits into them."""
    draw = Random(seed)  # noqa: S311
    teams = [
        TeamState("a", share=draw.choice((1.0, 2.0)), max_machines=draw.choice((None, 3, 6))),
        TeamState("b", max_usd_hour=draw.choice((None, 4.0))),
        TeamState("c", max_usd_month=draw.choice((None, None, 20.0))),
    ]
    limits = {"max_machines": draw.choice((None, 8)), "max_usd_hour": draw.choice((None, 12.0))}
    on = stack(pool("p", 5), pool("q", 4, usd=2.0), teams=teams, **limits)
    kept: tuple[Claim, ...] = ()
    for number in range(draw.randint(1, 9)):
        claim = a_claim(f"r{number}", draw)
        if claim.reserved and not of_running(_held(kept, on), on).fits(claim, claim.reserved):
            claim = replace(claim, reserved=0, waits=claim.since, started=None, dry_since=None, gap="")
        kept = (*kept, claim)
    used = tuple(TeamUse(team, draw.choice((0.0, 10.0, 200.0)), NOW) for team in TEAMS)
    return replace(_held(kept, on), use=used), on


def _held(claims: tuple[Claim, ...], on: StackState) -> Allocation:
    """Return these claims with all their grants, one after the other; what finds no machine has none."""
    held: tuple[Grant, ...] = ()
    for claim in claims:
        room = of_running(Allocation(grants=held, claims=claims), on)
        pools = [name for name, count in room.placed(claim.job) for _ in range(count)]
        if not claim.dry_since:
            found = pools[: claim.reserved - (claim.short.count if claim.short else 0)]
            held += tuple(Grant(claim.job, at, 1, f"slot:{name}", claim.since) for at, name in enumerate(found))
    return Allocation(grants=held, claims=claims)


def within_limits(claims_: tuple[Claim, ...], on: StackState) -> bool:
    """Whether machines for all reservations exist at once: one way is enough to divide them between the two pools."""
    ways: set[tuple[int, int]] = {(0, 0)}
    for claim in claims_:
        names = claim.pools or ("p", "q")
        ways = {
            (p + mine, q + claim.reserved - mine)
            for p, q in ways
            for mine in range(claim.reserved + 1)
            if (not mine or "p" in names) and (mine == claim.reserved or "q" in names)
        }
    return any(
        p <= 5 and q <= 4 and p + q <= (on.max_machines or 99) and p + 2 * q <= (on.max_usd_hour or 99) for p, q in ways
    )


@every
@given(seeds)
def test_limits_hold_gangs_are_whole_and_no_claim_is_lost(seed: int) -> None:
    before, on = a_situation(seed)
    after = schedule(before, on, NOW)
    assert [claim.job for claim in after.claims] == [claim.job for claim in before.claims]
    assert all(claim.reserved == 0 or claim.min <= claim.reserved <= claim.max for claim in after.claims)
    assert all((claim.waits is None) is (claim.reserved > 0) for claim in after.claims)
    assert within_limits(after.claims, on)
    have = Counter({team: sum(claim.reserved for claim in after.claims if claim.team == team) for team in TEAMS})
    assert have["a"] <= (on.team("a").max_machines or 99)
    assert (after.grants, after.use) == (before.grants, before.use)


@every
@given(seeds, st.integers(1, 3))
def test_a_search_never_has_more_trials_with_machines_than_its_parallel_allows(seed: int, parallel: int) -> None:
    before, on = a_situation(seed)
    draw, trials = Random(seed + 1), 0  # noqa: S311
    claims: list[Claim] = []
    for claim in before.claims:
        belongs = draw.random() < 0.8 and (not claim.reserved or trials < parallel)
        trials += bool(belongs and claim.reserved)
        claims.append(replace(claim, sweep="s", parallel=parallel) if belongs else claim)
    after = schedule(replace(before, claims=tuple(claims)), on, NOW)
    found = sum(bool(claim.reserved) for claim in after.claims if claim.sweep)
    event(f"{found} of {parallel}")
    assert found <= parallel
    assert schedule(after, on, NOW) is after


@every
@given(seeds)
def test_a_schedule_changes_nothing_the_second_time(seed: int) -> None:
    before, on = a_situation(seed)
    after = schedule(before, on, NOW)
    event("changed" if after is not before else "unchanged")
    assert schedule(after, on, NOW) is after


@every
@given(seeds)
def test_nothing_protected_is_taken(seed: int) -> None:
    before, on = a_situation(seed)
    after = schedule(before, on, NOW)
    for old, new in zip(before.claims, after.claims, strict=True):
        if new.reserved >= old.reserved or on.team(old.team).max_usd_month or new.reserved_at == NOW:
            continue  # its team has spent its money, or it lapsed and got another reservation at once
        taker = next(claim for claim in after.claims if claim.job == new.whom)
        assert NOW in (taker.reserved_at, taker.took)
        assert taker.reserved >= taker.min
        if reclaim.dry(old, NOW):
            assert (new.lapsed, new.recalls) == (NOW, old.recalls)
            continue
        assert reclaim.takeable(old, NOW, NOW)
        mine, theirs = rank(before.claim(taker.job), NOW), rank(old, NOW)  # type: ignore[arg-type]
        assert theirs <= mine
        assert theirs < mine or old.gap == taker.job or (old.team != taker.team and old.job not in taker.barred)
        assert new.recalls[-1] == NOW
        assert theirs < mine or new.barred[-1] == taker.job


@every
@given(seeds)
def test_the_first_in_the_order_is_served_or_would_not_fit(seed: int) -> None:
    """A job of a class gets no machine that one before it could have had."""
    before, on = a_situation(seed)
    after = schedule(before, on, NOW)
    order = {job: why for job, why in reasons(after, on, NOW).items() if "takes over" not in why}
    waiting = [claim for job in order if (claim := after.claim(job)) is not None and claim.stop is not Stop.NEVER]
    room = of_running(after, on)
    for claim in waiting[:1]:
        over = on.team(claim.team).max_usd_month is not None
        leaving = any(grant.job == claim.job for grant in after.grants)
        assert over or leaving or not room.fits(claim, claim.min)
