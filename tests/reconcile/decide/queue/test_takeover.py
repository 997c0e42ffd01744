"""A job that the cloud refuses machines takes over some that run: when, whose, and who waits meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from spotkeeper.contract.allocation import Allocation, Claim, Grant, Short
from spotkeeper.contract.job import JobRequest, RequestKind
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Hold, Phase
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.decide.queue import order, takeover
from spotkeeper.reconcile.decide.queue.scheduler import schedule
from tests.reconcile.decide.queue.situation import (
    HOUR_S,
    MIN_S,
    NOW,
    grants,
    pool,
    runs,
    stack,
    used,
    waits,
)
from tests.reconcile.world import JOB, World
from tests.reconcile.world import stack as world_stack

WIDE = stack(pool("p", 40), pool("q", 40))
MINUTE = 60.0
SECOND, THIRD = "wxyz2345", "third222"


def has(job: str, count: int, *, zone: str = "a", **more: Any) -> Claim:
    return runs(job, count, **{"priority": 0, "pools": ("p",), "zone": zone, **more})


def lacks(job: str, count: int, *, ago_s: float = 7 * MIN_S, have: int = 0, **more: Any) -> Claim:
    """Return a job with a reservation of ``have + count`` machines, of which the cloud refuses ``count``."""
    short = Short(NOW - ago_s, count, ("p/a",))
    dry = None if have else NOW - ago_s
    given = {"started": None, "short": short, "dry_since": dry, "ago_s": ago_s, **more}
    return runs(job, have + count, **given)


def after(*claims: Claim, on: Any = WIDE, now: float = NOW, **more: Any) -> dict[str, Claim]:
    own: list[Grant] = []
    for claim in claims:
        mine = grants(claim)
        own += mine if claim.short is None else mine[: claim.reserved - claim.short.count]
    allocation = schedule(Allocation(grants=tuple(own), claims=claims, **more), on, now)
    assert schedule(allocation, on, now) is allocation
    return {claim.job: claim for claim in allocation.claims}


def takes(*claims: Claim, **more: Any) -> set[str]:
    """Return the jobs that lost all machines to the job ``w``; none if it took over no machines."""
    got = after(*claims, **more)
    lost = {job for job, claim in got.items() if claim.whom == "w" and claim.recalls and not claim.reserved}
    assert (got["w"].took == more.get("now", NOW)) is bool(lost or any(claim.whom == "w" for claim in got.values()))
    return lost


def test_a_job_takes_over_the_machines_of_a_lower_class_once_it_has_asked_in_vain_for_seven_minutes() -> None:
    assert takes(has("v", 4), lacks("w", 4)) == {"v"}
    assert takes(has("v", 4), lacks("w", 4, ago_s=7 * MIN_S - 1)) == set()


@pytest.mark.parametrize(
    "victim",
    [{"zone": "b"}, {"zone": ""}, {"pools": ("q",)}, {"priority": 1}, {"started": NOW - 60}],
    ids=["another zone", "several zones", "another pool", "its own class", "protected"],
)
def test_it_takes_only_what_it_could_use_and_may_take(victim: dict[str, Any]) -> None:
    assert takes(has("v", 4, **victim), lacks("w", 4)) == set()


def test_it_takes_all_that_it_lacks_or_nothing() -> None:
    assert takes(has("v", 3), lacks("w", 4)) == set()
    assert takes(has("v", 3), lacks("w", 3, have=1)) == {"v"}
    assert takes(has("v", 3), lacks("w", 4, min=3)) == {"v"}


def test_elastic_jobs_shrink_first_and_only_as_far_as_needed() -> None:
    got = after(has("e", 6, min=2), has("v", 3), lacks("w", 3))
    assert {job: claim.reserved for job, claim in got.items()} == {"e": 3, "v": 3, "w": 3}


def test_a_team_beyond_its_entitlement_gives_way_to_one_that_has_used_less() -> None:
    """Of the machines that run, not of those that the limits allow."""
    claim = lacks("w", 3, team="a")
    victim, other = (has(job, 4, priority=1, team="b", cost_s=cost) for job, cost in (("v", 1.0), ("other", 2.0)))
    assert takes(victim, other, claim, use=used(b=1000.0)) == {"v"}
    assert takes(victim, other, claim, use=used(a=2000.0, b=1000.0)) == set()
    assert takes(replace(victim, team="a"), other, claim, use=used(b=1000.0)) == set()
    assert takes(victim, replace(other, team="c"), claim, use=used(b=1000.0)) == {"v"}
    assert takes(replace(victim, barred=(), team="b"), replace(claim, barred=("v",)), use=used(b=1000.0)) == set()


def test_it_does_so_once_an_hour_since_the_cloud_may_give_the_machines_to_others() -> None:
    assert takes(has("v", 4), lacks("w", 4, took=NOW - HOUR_S + 1, ago_s=HOUR_S)) == set()
    assert takes(has("v", 4), lacks("w", 4, took=NOW - HOUR_S, ago_s=HOUR_S)) == {"v"}


def test_who_gave_machines_up_and_lower_classes_leave_the_market_to_it_for_a_while() -> None:
    taker = lacks("w", 4, took=NOW - 15 * MIN_S + 1, ago_s=20 * MIN_S)
    late = [waits(job, 2, priority=priority) for job, priority in (("low", 0), ("same", 1), ("high", 2))]
    elsewhere = waits("q", 2, pools=("q",))

    def start(*claims: Claim, now: float = NOW) -> set[str]:
        return {job for job, claim in after(taker, *claims, now=now).items() if claim.reserved and job != "w"}

    assert start(*late, elsewhere) == {"high", "q"}
    assert start(*late, now=NOW + 1) == {"low", "same", "high"}
    grows = has("e", 2, max=6)
    assert after(taker, grows)["e"].reserved == 2
    assert after(replace(taker, short=None), grows)["e"].reserved == 6
    named = replace(taker, name="gpt")
    why = order.why(Allocation(claims=(named, late[0])), WIDE, late[0], NOW)
    assert why == "job gpt takes over machines first, since the cloud has no others for it"


def test_lower_classes_that_look_for_machines_there_stop_looking() -> None:
    rival, other = (replace(lacks(job, 2, ago_s=MIN_S), priority=0) for job in ("rival", "other"))
    got = after(has("v", 4), lacks("w", 4), rival, replace(other, pools=("q",)))
    assert (got["rival"].reserved, got["rival"].lapsed, got["rival"].recalls) == (0, NOW, ())
    assert got["other"].reserved == 2


def test_one_that_stopped_looking_takes_over_no_machines_itself() -> None:
    wide = {"pools": ("p", "q"), "short": Short(NOW - 7 * MIN_S, 1, ("p/a", "q/a"))}
    got = after(
        lacks("w", 2, priority=2), has("v", 2), lacks("s", 1, **wide), has("m", 1, pools=("q",))
    )  # `s` could take the machine of `m`, but `w` comes first
    assert {job: claim.reserved for job, claim in got.items()} == {"w": 2, "v": 0, "s": 0, "m": 1}


@pytest.mark.parametrize(("took_s", "machines"), [(15 * MIN_S - 1, 0), (15 * MIN_S, 2)])
def test_no_job_of_a_higher_class_gets_its_turn_while_it_takes_over(took_s: float, machines: int) -> None:
    claim = lacks("w", 2, ago_s=30 * MIN_S, took=NOW - took_s)
    assert after(claim, waits("x", 2, priority=2), on=stack(cap=2))["x"].reserved == machines


def test_its_own_reservation_stays_until_the_machines_can_have_come() -> None:
    """Fifteen minutes without a machine count from then on."""
    taker = lacks("w", 4, took=NOW - 15 * MIN_S + 1, ago_s=HOUR_S)
    wide = stack(pool("p", 4))
    assert after(taker, waits("x", 4, "x"), on=wide)["w"].reserved == 4
    assert after(replace(taker, took=NOW - 15 * MIN_S), waits("x", 4, "x"), on=wide)["w"].reserved == 0


# -- whole jobs


def submit(world: World, job: str, **spec: object) -> None:
    world.spec = replace(world.spec, **spec)
    world.submit(job)


def world_of(machines: int) -> World:
    world = World(the_stack=world_stack(max_machines=20), nodes=2, policy="spot")
    world.capacity |= {(zone, Model.SPOT): 0 for zone in ("z-a", "z-b", "z-c")}
    world.capacity["z-b", Model.SPOT] = machines
    submit(world, JOB, priority="low")
    world.until(world.training)
    world.run(20 * MINUTE)
    return world


def test_a_job_gets_the_machines_of_a_lower_priority_where_the_market_has_no_others() -> None:
    world = world_of(2)
    submit(world, SECOND, priority="normal")
    world.until(lambda: world.record().stop, 9 * MINUTE)
    world.until(lambda: world.training(SECOND), 6 * MINUTE)
    assert world.record().hold is Hold.QUEUE
    world.run(30 * MINUTE)
    world.store.put_request(SECOND, JobRequest(id="c", kind=RequestKind.CANCEL, at=world.t))
    world.until(world.training, 30 * MINUTE)
    assert not [entry.again for entry in world.events(Event.GENERATION) if entry.again], "no step is trained twice"


def test_a_gang_keeps_the_machines_that_it_has_while_it_takes_over_the_rest() -> None:
    world = world_of(3)
    submit(world, SECOND, priority="normal")
    world.until(lambda: world.training(SECOND), 20 * MINUTE)
    assert not world.events(Event.HOLD, job=SECOND)


def test_if_the_cloud_gives_the_machines_to_others_the_first_job_looks_for_machines_again() -> None:
    world = world_of(2)
    submit(world, SECOND, priority="normal")
    world.until(lambda: world.record().hold is Hold.QUEUE, 15 * MINUTE)
    world.capacity["z-b", Model.SPOT] = 0
    taken = world.memory.allocation[0].claim(SECOND).took  # type: ignore[union-attr]
    world.until(lambda: world.record().phase is Phase.RUN, takeover.HANDOVER_S + 2 * MINUTE)
    assert world.t - taken >= takeover.HANDOVER_S
    world.capacity["z-b", Model.SPOT] = 2
    world.until(lambda: world.training(SECOND) or world.training(), 30 * MINUTE)
