"""What the queue does not do better, and the bounds of it: gaps that idle, and low jobs under endless urgent ones."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from spotkeeper.contract import codec
from spotkeeper.contract.allocation import Allocation, Claim, Stop
from spotkeeper.contract.cloud import Listing
from spotkeeper.contract.job import MOST_NODES, JobSpec
from spotkeeper.contract.record import Node, Record, Slot, SlotState
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.queue import claim
from spotkeeper.reconcile.decide.queue.scheduler import schedule
from spotkeeper.reconcile.decide.snapshot import Snapshot
from tests.reconcile.decide.queue.situation import (
    DAY_S,
    HOUR_S,
    MIN_S,
    NOW,
    grants,
    reserved,
    runs,
    shares,
    stack,
    waits,
)


@pytest.mark.parametrize("small", [{"stop": Stop.NEVER}, {"min": 3, "max": 3}], ids=["would lose work", "too large"])
def test_a_gap_idles_if_nothing_may_run_in_it(small: dict[str, object]) -> None:
    """Two of eight machines are free, and the gang that comes first needs all of them."""
    busy = runs("r", 6, stop=Stop.NEVER)
    gang, other = waits("gang", 8, ago_s=HOUR_S), waits("other", 2, **small)
    assert reserved(busy, gang, other) == {"r": 6, "gang": 0, "other": 0}
    assert reserved(busy, gang, waits("other", 2, stop=Stop.SAVED))["other"] == 2
    assert reserved(gang, other) == {"gang": 8, "other": 0}, "it ends with the wait of the gang"


def test_a_low_job_under_endless_high_ones_gets_two_hours_of_each_two_days() -> None:
    """It reaches the highest class after 48 hours, starts in its turn, and keeps that class for two hours."""
    step_s, work_s = 10 * MIN_S, 3 * HOUR_S
    claims: tuple[Claim, ...] = (waits("low", 8, "poor", ago_s=0.0, priority=0, stop=Stop.SAVED),)
    ran: list[float] = []  # hours of each of its runs
    waited_s = longest_s = 0.0
    for step in range(int(12 * DAY_S / step_s)):
        now = NOW + step * step_s
        done = {claim.job for claim in claims if claim.job != "low" and claim.reserved}
        done = {job for job in done if now - next(c for c in claims if c.job == job).reserved_at >= work_s}
        claims = tuple(claim for claim in claims if claim.job not in done)
        if sum(claim.waiting for claim in claims if claim.job != "low") < 2:  # there is always another one
            new = {"since": now, "waits": now, "priority": 2, "stop": Stop.SAVED}
            claims += (waits(f"high{step}", 8, f"rich{step % 3}", **new),)
        before = next(claim for claim in claims if claim.job == "low").reserved
        allocation = Allocation(grants=grants(*claims), claims=claims)
        claims = schedule(allocation, stack(), now).claims
        claims = tuple(replace(one, started=one.started or now) if one.reserved else one for one in claims)
        low = next(claim for claim in claims if claim.job == "low")
        assert sum(claim.reserved for claim in claims) == 8, "no machine idles"
        if low.reserved:
            waited_s = 0.0
            ran = [*ran, 0.0] if not before else ran
            ran[-1] += step_s / HOUR_S
        else:
            waited_s += step_s
            longest_s = max(longest_s, waited_s)
    assert len(ran) >= 5
    assert all(2.0 <= hours <= 2.5 for hours in ran[:-1]), ran
    assert longest_s <= 2 * DAY_S + work_s, "its turn comes when the job that runs ends"


def test_a_record_has_no_more_nodes_than_a_job_file_allows() -> None:
    record = Record("abcd2345", "u", "first", "0" * 64, NOW, nodes=(Node(),) * MOST_NODES)
    assert codec.decode(msgspec.json.encode(record), Record) == record
    with pytest.raises(msgspec.ValidationError, match="length <= 10000"):
        codec.decode(msgspec.json.encode(replace(record, nodes=(*record.nodes, Node()))), Record)


def test_a_forged_record_claims_no_more_machines_than_its_job_file_allows() -> None:
    """Submitters create records. With a claim above 10,000 machines, nobody could read the allocation."""
    slot = Slot(attempt=1, state=SlotState.ADMITTED, pool="p", zone="a", model=Model.SPOT, since=NOW)
    record = Record("abcd2345", "u", "first", "0" * 64, NOW, nodes=(Node(cur=slot),) * 10_001)
    spec = JobSpec(name="first", command=("train.py",), nodes=2)
    other = Allocation(claims=(waits("w", 1),))
    draft = Draft(record, Snapshot(stack=stack(), spec=spec, listing=Listing((), ()), now=NOW, allocation=other))
    made = claim.planned(draft)
    assert codec.decode(msgspec.json.encode(made), Allocation) == made
    assert [one.reserved for one in made.claims if one.job == "abcd2345"] == [2]


def test_a_gang_larger_than_its_teams_share_waits_for_a_day_while_others_want_all_machines() -> None:
    """Then its class is higher; before, it would leave the other team less than its share."""
    small, teams = [runs(f"a{number}", 1, "a") for number in range(8)], shares(a=1, b=1)
    for waited_s, got in ((DAY_S - 1, 0), (DAY_S, 8)):
        assert reserved(*small, waits("gang", 8, "b", ago_s=waited_s), on=stack(teams=teams))["gang"] == got
