"""When a rung is decided: trials on hold, cancelled and deleted ones, and what a decision and a tick cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace as changed

import pytest
from msgspec.structs import replace

from spotkeeper.contract.allocation import Allocation, Claim
from spotkeeper.contract.facts import Fact, Kind, Rung
from spotkeeper.contract.job import Checkpoint, Mirror, RequestKind
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Hold, Limits, Outcome, Phase, TrialProgress
from spotkeeper.contract.sweep import Decided, SweepState, Trial, TrialReport
from spotkeeper.reconcile.controller.tick import RESTS, _at_rungs, tick
from spotkeeper.reconcile.decide import Draft
from spotkeeper.reconcile.decide.gang import rungs
from spotkeeper.reconcile.store.documents import Versioned
from tests.reconcile.decide.test_decide import NOW
from tests.reconcile.decide.test_guards import calm, on_record
from tests.reconcile.search import Search, job


def test_a_trial_rests_only_once_it_has_reported_and_until_its_rung_is_decided() -> None:
    told = tuple(TrialReport(number, (0.5,), job=job(number)) for number in range(2))
    assert rungs.resting(SweepState("lr", trials=told)) == {job(0), job(1)}
    assert rungs.resting(SweepState("lr", trials=(TrialReport(0, job=job(0)),))) == frozenset()
    made = Decided(0, 0, (0, 1), 1)
    assert rungs.resting(SweepState("lr", trials=told, decided=(made,))) == frozenset()
    further = (*told, TrialReport(2, (0.5, 0.4), job=job(2)), TrialReport(7, (0.5,), job=job(7), first=7))
    assert rungs.resting(SweepState("lr", trials=further, decided=(made,))) == {job(2), job(7)}


def test_a_decision_wakes_the_trials_at_its_rung_and_spent_money_wakes_all() -> None:
    of = Trial("lr", 0, "loss", count=3, rungs=(10, 20), max_usd=2.0)
    told = [TrialReport(number, (0.5,) * count, job=job(number)) for number, count in ((0, 1), (1, 2), (2, 0))]
    over = TrialReport(3, (0.5,), over=True, job=job(3))
    before = SweepState("lr", trials=(*told, over, TrialReport(4, (0.5,), job=job(4), first=4)))
    after = replace(before, decided=(Decided(0, 0, (0, 1, 3), 1),))
    assert rungs.woken(before, before, of) == frozenset()
    assert rungs.woken(before, after, of) == {job(0)}
    assert rungs.woken(after, replace(after, decided=(*after.decided, Decided(0, 1, (1,), 1))), of) == {job(1)}
    spent = before.told(replace(told[0], spent=2.0))
    assert rungs.woken(before, spent, of) == {job(0), job(1), job(2), job(4)}
    assert rungs.woken(spent, spent.told(replace(told[0], spent=3.0)), of) == frozenset(), "they know"


@pytest.mark.parametrize("better", [True, False])
def test_a_paused_trial_keeps_nobody_waiting_and_is_compared_once_it_is_resumed(better: bool) -> None:
    search = Search(count=4)
    search.values |= {(0, 20): 0.0 if better else 2.5}
    search.submit()
    world = search.world
    world.until(lambda: world.record(job(0)).gen == 1)
    search.request(0, RequestKind.PAUSE)
    world.until(lambda: search.state().decision(0, 1) is not None, 3000)
    assert search.state().decided == (Decided(0, 0, (1, 2, 3), 2), Decided(0, 1, (1, 2), 1))
    assert world.record(job(0)).hold is Hold.PAUSE and search.state().trial(0).held
    assert world.store.read_allocation().value.claim(job(0)) is None, "ticks see to it"
    search.request(0, RequestKind.RESUME)
    world.until(search.over, 6000)
    assert search.outcomes() == [
        Outcome.SUCCEEDED if better else Outcome.STOPPED, Outcome.SUCCEEDED, *[Outcome.STOPPED] * 2
    ]  # fmt: skip
    told = "on hold when step 20 was decided, and "
    if better:
        details = [entry.detail for entry in world.events(Event.RESUME, job=job(0)) if entry.cause == "rung"]
        assert details[0] == told + "better than the last of the best 2" and len(details) == 2
    else:
        assert world.record(job(0)).reason == told + "not better than the last of the best 2"


def test_a_trial_that_has_spent_its_own_money_keeps_nobody_waiting() -> None:
    search = Search(count=3)
    world = search.world
    world.submit(job(0), replace(search.spec(0), max_usd=0.0001))
    search.submit(1, 2)
    world.until(lambda: search.state().decision(0, 0) is not None, 3000)
    assert world.record(job(0)).hold is Hold.SPEND and search.state().decision(0, 0) == Decided(0, 0, (1, 2), 1)


def test_the_place_of_a_trial_that_is_cancelled_at_its_rung_goes_to_another() -> None:
    search = Search(count=3, eta=3)
    search.submit(0, 1)
    world = search.world
    world.until(lambda: search.holds(0) and search.holds(1))
    search.request(0, RequestKind.CANCEL)
    world.until(lambda: world.record(job(0)).phase is Phase.DONE)
    search.submit(2)
    world.until(search.over, 3000)
    assert search.outcomes() == [Outcome.CANCELLED, Outcome.SUCCEEDED, Outcome.STOPPED]
    assert search.state().decision(0, 0) == Decided(0, 0, (1, 2, 0), 1)


@pytest.mark.parametrize("marker", [True, False])
@pytest.mark.parametrize("waits", [True, False])
def test_a_trial_whose_record_was_deleted_keeps_nobody_waiting(waits: bool, marker: bool) -> None:
    search = Search(count=3, eta=3)
    search.submit(*((0, 1) if waits else (1, 2)))
    world = search.world
    world.until(lambda: all(search.holds(number) for number in ((0, 1) if waits else (1, 2))))
    world.run(120)
    if not waits:
        search.submit(0)
        world.until(lambda: world.record(job(0)).gen == 1)
    del world.memory.records[job(0)]
    if not marker:
        world.store.clear_active(job(0))
    world.may_fail = True
    world.until(lambda: search.state().trial(0).over, 31 * 60)
    if waits:
        search.submit(2)
    world.until(lambda: search.state().decision(0, 0) is not None, 600 if waits else 10)
    world.until(lambda: all(world.record(job(number)).phase is Phase.DONE for number in (1, 2)), 6000)
    assert [world.record(job(number)).outcome for number in (1, 2)] == [Outcome.SUCCEEDED, Outcome.STOPPED]


def test_ticks_do_not_read_the_records_of_trials_that_wait() -> None:
    search = Search(count=6, parallel=5, eta=3)
    world = search.world
    search.submit(*range(5))
    world.until(lambda: all(map(search.holds, range(5))))
    world.run(120)
    read, reads = world.memory.read_record, list[str]()

    def counted(name: str) -> object:
        reads.append(name)
        return read(name)

    world.memory.read_record = counted  # type: ignore[method-assign, assignment]
    ticks = 30
    for _ in range(ticks):
        tick(world.store, world, world, world.options)
        world.t += 60
    assert {name: reads.count(name) for name in set(reads)} == dict.fromkeys(map(job, range(5)), 2), "once, and a round"
    assert [claim.job for claim in world.store.read_allocation().value.claims if claim.rests] == [*map(job, range(5))]
    world.memory.read_record = read  # type: ignore[method-assign]
    search.submit(5)
    world.until(search.over, 3000)
    assert world.store.read_allocation().value.claims == ()


def test_a_trial_rests_at_its_rung_without_machines_and_in_most_ticks() -> None:
    told = tuple(TrialReport(number, (0.5,), job=job(number)) for number in range(60))
    read = Versioned(SweepState("lr", trials=told), "1")
    claims = [Claim(job(number), 0, 0, 0.0, sweep="lr") for number in range(59)]
    claims.append(Claim("new", 0, 0, 0.0, sweep="lr"))
    claims[0] = Claim(job(0), 1, 1, 0.0, sweep="lr")
    allocation = Versioned(Allocation(claims=tuple(claims)), "1")
    found = [_at_rungs([read], allocation, {job(1)}, 60.0 * minute) for minute in range(RESTS)]
    assert set().union(*found) == set(map(job, range(2, 59))), "the others want machines, have some, or are unknown"
    visits = Counter(one for rests in found for one in set(map(job, range(2, 59))) - rests)
    assert visits == dict.fromkeys(map(job, range(2, 59)), 1)
    assert _at_rungs([], allocation, set(), 0.0) == _at_rungs([read], None, set(), 0.0) == set()


@pytest.mark.parametrize(
    ("hold", "until", "held"),
    [
        (Hold.PAUSE, None, True),
        (Hold.SPEND, None, True),
        (Hold.MAX_WAIT, None, True),
        (Hold.CLOUD, NOW + 60, False),
        (Hold.CAPACITY, NOW + 60, False),
        (Hold.QUEUE, None, False),
        (Hold.RUNG, None, False),
        (None, None, False),
    ],
)
def test_a_trial_is_held_if_only_a_person_ends_its_hold(hold: Hold | None, until: float | None, held: bool) -> None:
    of = Trial("lr", 5, "loss", first=4, count=3, rungs=(20,))
    phase = Phase.RUN if hold is None else Phase.HOLD
    record, snapshot = on_record(phase=phase, hold=hold, hold_until=until, trial=TrialProgress(of))(*calm(1))
    found = rungs.report(Draft(record, changed(snapshot, sweep=SweepState("lr", 6))))
    assert found is not None and found.ver == 7
    told = found.trial(5)
    assert (told.held, told.first, told.job, told.values, told.over) == (held, 4, record.job, (), False)
    again = changed(snapshot, sweep=found)
    assert rungs.report(Draft(record, again)) is None, "nothing is new"


@pytest.mark.parametrize(("spent", "told"), [(0.01, None), (0.012345, 0.0123)])
def test_a_trials_cost_is_told_again_once_it_has_grown(spent: float, told: float | None) -> None:
    """By more than a hundredth of what the search may cost, divided by the trials at work."""
    of = Trial("lr", 0, "loss", count=2, parallel=2, max_usd=2.0)
    record, snapshot = on_record(trial=TrialProgress(of), limits=Limits(spent=spent))(*calm(1))
    known = SweepState("lr", trials=(TrialReport(0, job=record.job),))
    found = rungs.report(Draft(record, changed(snapshot, sweep=known)))
    assert (None if found is None else found.trial(0).spent) == told


def test_of_two_words_about_the_rung_the_further_one_counts() -> None:
    of = Trial("lr", 0, "loss", count=2, rungs=(20,))
    for values in ((Rung(10, 1.0), Rung(20, 0.5)), (Rung(20, 0.5), Rung(10, 1.0))):
        record, snapshot = on_record(trial=TrialProgress(of))(*calm(1))
        gen, slot = record.gen, record.nodes[0].cur
        assert slot is not None and slot.uid and slot.boot
        told = [Fact(slot.uid, slot.boot, 0, slot.attempt, gen, Kind.RUNG, str(rung)) for rung in values]
        ended = Fact(slot.uid, slot.boot, 0, slot.attempt, gen, Kind.RELEASED, "20")
        draft = Draft(record, changed(snapshot, facts=(*snapshot.facts, *told, ended)))
        rungs.step(draft)
        assert draft.record.trial is not None and draft.record.trial.values == (0.5,)


def test_the_next_trial_has_its_reservation_once_a_machine_is_gone() -> None:
    """With the write that releases the grant, and not by the next tick."""
    search = Search(count=2, parallel=1)
    search.submit()
    world = search.world
    world.until(lambda: search.holds(0), 3000)

    def left() -> bool:
        return any(grant.job == job(0) for grant in world.store.read_allocation().value.grants)

    reserved = []
    while left():
        reserved.append(world.store.read_allocation().value.claim(job(1)).reserved)  # type: ignore[union-attr]
        world.step()
    assert set(reserved) == {0}, "its machine is there"
    assert world.store.read_allocation().value.claim(job(1)).reserved == 1  # type: ignore[union-attr]


# -- which disks go


@pytest.mark.parametrize("newer", [True, False])
def test_a_disk_with_a_newer_checkpoint_than_the_copy_stays(newer: bool) -> None:
    """A machine can report a later checkpoint after the hold was decided: no copy has it."""
    search = Search(count=2)
    search.submit(0)
    world = search.world
    world.until(lambda: search.holds(0))
    read = world.store.read_record(job(0))
    assert read is not None and read.value.mirror[0].commit == "1-20" and len(world.drives) == 1
    assert world.store.cas_record(replace(read.value, told="1-21" if newer else "1-20", nonce="late"), read.token)
    world.run(300)
    assert len(world.drives) == newer


def test_with_sharded_state_every_node_continues_from_the_copy_of_its_part() -> None:
    search = Search(count=2, nodes=3, checkpoint=Checkpoint(mirror=Mirror(every_min=1000.0), replicated=False))
    search.submit(0)
    world = search.world
    world.until(lambda: search.holds(0))
    world.run(120)
    assert not world.drives and not [machine for machine in world.machines.values() if machine.vm.job]
    search.submit(1)
    world.until(search.over, 6000)
    assert search.outcomes() == [Outcome.SUCCEEDED, Outcome.STOPPED]
    assert sorted(commit for _, commit in world.started if commit is not None) == [(1, 20)], "it is alone then"


def test_with_sharded_state_all_disks_stay_without_a_copy() -> None:
    search = Search(count=2, nodes=3, checkpoint=Checkpoint(mirror=Mirror(every_min=1000.0), replicated=False))
    search.world.copies = False
    search.submit(0)
    search.world.until(lambda: search.holds(0), rungs.COPY_S + 300)
    search.world.run(300)
    assert len(search.world.drives) == 3
    search.submit(1)
    search.world.until(search.over, 6000)
    assert search.outcomes()[0] is Outcome.SUCCEEDED


@pytest.mark.parametrize("copies", [True, False])
def test_a_static_machine_is_free_while_its_trial_waits(copies: bool) -> None:
    search = Search(count=2, static=1, rungs=(20,))
    world = search.world
    world.copies = copies
    world.run(10)
    search.submit(0)
    world.until(lambda: world.record(job(0)).gen == 1)
    assert world.record(job(0)).nodes[0].cur.machine  # type: ignore[union-attr]
    world.until(lambda: search.holds(0), rungs.COPY_S + 300)
    world.run(120)
    assert world.store.read_allocation().value.grants == ()
    assert bool(world.record(job(0)).nodes[0].machine) is not copies, "without a copy only its disk has the checkpoint"
    search.submit(1)
    world.until(search.over, 6000)
    assert search.outcomes() == [Outcome.SUCCEEDED, Outcome.STOPPED]


def test_keep_disks_keeps_them_at_rungs_too() -> None:
    search = Search(count=2)
    world = search.world
    world.submit(job(0), replace(search.spec(0), keep_disks=True))
    world.until(lambda: search.holds(0))
    world.run(300)
    kept = [drive.disk.name for drive in world.drives.values()]
    assert len(kept) == 1 and world.store.read_allocation().value.claims == (), "each tick sees its disk: no rest"
    world.submit(job(1), replace(search.spec(1), keep_disks=True))
    world.until(search.over, 3000)
    assert search.outcomes() == [Outcome.SUCCEEDED, Outcome.STOPPED]
    assert [drive.disk.name for drive in world.drives.values() if drive.disk.job == job(0)] == kept, (
        "and continues there"
    )
    assert len(world.drives) == 2
