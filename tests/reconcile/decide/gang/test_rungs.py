"""Trials of a search as whole jobs: they stop at rungs, wait without disks, and the best go on at the same step."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from spotkeeper.contract.facts import Rung
from spotkeeper.contract.job import Checkpoint, JobRequest, JobSpec, RequestKind
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Hold, Outcome, Phase
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.controller.reconcile_job import Prefetched, run_round
from spotkeeper.reconcile.controller.tick import tick
from spotkeeper.reconcile.decide.gang import rungs
from spotkeeper.reconcile.store.documents import CorruptError
from spotkeeper.reconcile.store.objects import StoreError
from tests.reconcile.search import Search, job


def test_the_best_half_continues_at_each_rung() -> None:
    search = Search()
    search.submit()
    search.world.until(search.over, 3000)
    assert search.outcomes() == [Outcome.SUCCEEDED, *[Outcome.STOPPED] * 3]
    assert [trial.values for trial in search.state().trials] == [(0.0, 0.0), (1.0, 1.0), (2.0,), (3.0,)]
    assert [trial.over for trial in search.state().trials] == [True] * 4
    assert search.state().trial(0).final == 0.0
    reasons = [search.world.record(job(number)).reason for number in (1, 3)]
    assert reasons == [
        "number 2 of 2 at step 60, and the best 1 continue",
        "number 4 of 4 at step 20, and the best 2 continue",
    ]
    assert [entry.id for entry in search.world.events(Event.RUNG, job=job(0))] == ["rung.r0", "rung.r1"]
    restored = [commit for _, commit in search.world.started if commit is not None]
    assert sorted(step for _, step in restored) == [20, 20, 60], "each went on at the step of its rung"


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_waiting_trial_has_a_copy_in_the_bucket_and_neither_machine_nor_disk(nodes: int) -> None:
    search = Search(count=2, nodes=nodes)
    search.submit(0)
    search.world.until(lambda: search.holds(0))
    search.world.run(120)
    assert search.holds(0), "the other trial has not reported"
    world = search.world
    assert [drive.disk.job for drive in world.drives.values()] == []
    assert [machine.vm.job for machine in world.machines.values()] == []
    assert max(world.buckets[job(0)])[1] == 20
    assert "until its other trials are there" in world.record(job(0)).reason
    search.submit(1)
    world.until(search.over, 3000)
    assert search.outcomes() == [Outcome.SUCCEEDED, Outcome.STOPPED]


def test_without_a_copy_the_disk_stays_and_training_goes_on_from_it() -> None:
    search = Search(count=2)
    search.world.copies = False
    search.submit(0)
    search.world.until(lambda: search.holds(0), rungs.COPY_S + 300)
    assert [drive.disk.job for drive in search.world.drives.values()] == [job(0)]
    assert [entry.detail for entry in search.world.events(Event.RUNG, job=job(0))] == ["step 20: loss 0"]
    search.submit(1)
    search.world.until(search.over, 6000)
    assert search.outcomes()[0] is Outcome.SUCCEEDED


def test_a_trial_whose_checkpoints_have_no_copies_keeps_its_disk_and_waits_for_none() -> None:
    search = Search(count=2)
    spec = replace(search.spec(0), checkpoint=Checkpoint())
    search.world.submit(job(0), spec)
    search.world.until(lambda: search.holds(0), rungs.COPY_S / 3)
    assert [drive.disk.job for drive in search.world.drives.values()] == [job(0)]


def test_machines_wait_for_the_copy_until_its_time_is_over() -> None:
    search = Search(count=2)
    search.world.copies = False
    search.submit(0)
    search.world.until(lambda: bool(search.world.events(Event.RUNG, job=job(0))))
    reached = search.world.t
    assert "copying the checkpoint" in search.world.record(job(0)).reason or search.world.run(3) is None
    search.world.run(rungs.COPY_S - 60)
    assert not search.holds(0)
    search.world.until(lambda: search.holds(0), 180)
    assert search.world.t - reached >= rungs.COPY_S - 1


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_machine_lost_while_the_checkpoint_is_copied_changes_nothing(nodes: int) -> None:
    search = Search(count=2, nodes=nodes)
    search.world.copies = False
    search.submit()
    search.world.until(lambda: all(search.world.events(Event.RUNG, job=job(n)) for n in range(2)))
    doomed = next(m for m in search.world.machines.values() if m.vm.job == job(0))
    search.world._remove(doomed)
    search.world.run(60)
    search.world.copies = True
    search.world.until(search.over, 6000)
    assert search.outcomes() == [Outcome.SUCCEEDED, Outcome.STOPPED]
    assert search.state().trial(0).values == (0.0,)
    assert len(search.world.events(Event.RUNG, job=job(0))) == 1, "its rung is reached once; then it is alone"


def test_a_trial_that_fails_holds_nobody_up() -> None:
    search = Search(count=3, eta=3)
    search.submit(0, 2)
    search.world.until(lambda: search.holds(0) and search.holds(2))
    search.world.crashing = 100
    search.submit(1)
    search.world.until(lambda: search.world.record(job(1)).over, 3000)
    assert search.world.record(job(1)).outcome is Outcome.FAILED, "it does not go on hold for two weeks"
    search.world.crashing = 0
    search.world.until(search.over, 3000)
    assert search.outcomes() == [Outcome.SUCCEEDED, Outcome.FAILED, Outcome.STOPPED]


def test_a_cancelled_trial_reports_that_it_is_over() -> None:
    search = Search(count=3, eta=3)
    search.submit()
    search.world.run(5)
    search.request(0, RequestKind.CANCEL)
    search.world.until(search.over, 3000)
    assert search.outcomes() == [Outcome.CANCELLED, Outcome.SUCCEEDED, Outcome.STOPPED]


def test_at_most_parallel_trials_have_machines() -> None:
    search = Search(count=6, parallel=2, eta=3)
    search.submit()
    most = 0

    def over() -> bool:
        nonlocal most
        jobs = {grant.job for grant in search.world.store.read_allocation().value.grants}
        most = max(most, len(jobs))
        return search.over()

    waits = search.world.record(job(5))
    assert "search lr has 2 trials at work" in waits.reason
    search.world.until(over, 9000)
    assert most == 2
    assert search.outcomes() == [Outcome.SUCCEEDED, *[Outcome.STOPPED] * 5]


def test_a_search_that_has_spent_its_money_ends_every_trial() -> None:
    search = Search(count=4, parallel=2, max_usd=0.03)
    search.submit()
    search.world.until(search.over, 9000)
    assert Outcome.SUCCEEDED not in search.outcomes()
    assert all(outcome is Outcome.STOPPED for outcome in search.outcomes())
    spent = search.state().spent()
    assert 0.03 <= spent < 0.033, spent
    said = {search.world.record(job(n)).reason for n in range(4)}
    assert any(reason.startswith("search lr has spent $0.03 of its $0.03") for reason in said)


def test_no_number_ends_a_trial_and_no_number_at_all_ends_the_search() -> None:
    search = Search(count=3, eta=3)
    search.values |= {(n, 20): None for n in range(3)}
    search.submit()
    search.world.until(search.over, 3000)
    assert search.outcomes() == [Outcome.STOPPED] * 3
    assert search.world.record(job(0)).reason == "no trial reported loss at step 20"


def test_without_rungs_trials_run_to_their_end_and_report_it() -> None:
    search = Search(count=2, rungs=())
    search.submit()
    search.world.until(search.over, 3000)
    assert search.outcomes() == [Outcome.SUCCEEDED] * 2
    assert [(trial.values, trial.final, trial.over) for trial in search.state().trials] == [
        ((), 0.0, True),
        ((), 1.0, True),
    ]


@pytest.mark.parametrize("seed", range(4))
def test_losses_and_killed_functions_change_no_decision(seed: int) -> None:
    search, chance = Search(count=5, parallel=3, eta=2), random.Random(seed)  # noqa: S311  seeded
    search.world.random = random.Random(seed)  # noqa: S311
    search.values |= {(n, step): float((n * 7 + step) % 5) for n in range(5) for step in (20, 60, 100)}
    search.submit()
    search.world.crash_rate = 0.02

    def over() -> bool:
        if chance.random() < 0.02:
            there = [m for m in search.world.machines.values() if m.vm.job and m.vm.model is Model.SPOT]
            if there:
                search.world._remove(chance.choice(there))
        return search.over()

    search.world.until(over, 20_000)
    calm = Search(count=5, parallel=3, eta=2)
    calm.values = search.values
    calm.submit()
    calm.world.until(calm.over, 9000)
    assert search.outcomes() == calm.outcomes()
    assert len(calm.state().decided) == 2 and set(search.state().decided) == set(calm.state().decided)


def test_a_state_that_was_deleted_is_reported_again() -> None:
    search = Search(count=3, eta=3)
    search.submit(0, 1)
    search.world.until(lambda: search.holds(0) and search.holds(1))
    search.world.memory.sweeps.clear()
    search.submit(2)
    search.world.until(search.over, 3000)
    assert search.outcomes() == [Outcome.SUCCEEDED, Outcome.STOPPED, Outcome.STOPPED]


@pytest.mark.parametrize(
    "text", ["", "7", "7-", "-7-none", "7-nan", "7-7ff8", "7-NONE", "7-3ff000000000000G", "7-none\n"]
)
def test_a_rungs_text_is_checked(text: str) -> None:
    assert Rung.parse(text) is None


@pytest.mark.parametrize("value", [0.1, -1e308, 5e-324, None])
def test_a_rungs_text_keeps_the_value(value: float | None) -> None:
    assert Rung.parse(str(Rung(12, value))) == Rung(12, value)


def test_infinity_is_no_value() -> None:
    assert Rung.parse(str(Rung(3, float("inf")))) == Rung(3, None)
    assert Rung.parse(str(Rung(3, float("nan")))) == Rung(3, None)


def test_ticks_leave_trials_that_wait_alone_until_something_follows() -> None:
    search = Search(count=3, eta=3)
    search.submit(0, 1)
    world = search.world
    world.until(lambda: search.holds(0) and search.holds(1))
    world.run(120)  # their disks are deleted
    rounds: list[str] = []
    take = world.memory.take_lease

    def counted(job: str, *more: object) -> bool:
        rounds.append(job)
        return take(job, *more)  # type: ignore[arg-type]

    world.memory.take_lease = counted  # type: ignore[method-assign]
    world.run(1200)
    assert rounds and len(rounds) <= 2 * 2, "20 ticks, of which at most one visits each"
    search.submit(2)
    world.until(search.over, 3000)
    assert search.outcomes() == [Outcome.SUCCEEDED, Outcome.STOPPED, Outcome.STOPPED]


def test_a_round_that_read_an_old_record_takes_no_report_back() -> None:
    search = Search(count=2)
    search.submit(0)
    world = search.world
    world.until(lambda: search.holds(0))
    world.run(120)
    old = world.store.read_record(job(0))
    search.request(0, RequestKind.CANCEL)
    world.until(lambda: world.record(job(0)).phase is Phase.DONE)
    told = search.state().trial(0)
    assert old is not None and told.over
    run_round(world.store, world, job(0), world, world.options, Prefetched(old, world.list(world.stack.stack)))
    assert search.state().trial(0) == told
    search.submit(1)
    world.until(search.over, 3000)


@pytest.mark.parametrize("copies", [True, False])
def test_a_users_pause_outlasts_the_rung(copies: bool) -> None:
    search = Search(count=2)
    world = search.world
    world.copies = False
    search.submit(0)
    world.until(lambda: bool(world.events(Event.RUNG, job=job(0))))
    search.request(0, RequestKind.PAUSE)
    world.copies = copies
    world.until(lambda: world.record(job(0)).phase is Phase.HOLD, rungs.COPY_S + 300)
    assert world.record(job(0)).hold is Hold.PAUSE
    search.submit(1)
    world.until(lambda: world.record(job(1)).over, 3000)
    assert world.record(job(0)).hold is Hold.PAUSE, "its value counts, but it does not go on by itself"
    world.copies = True
    search.request(0, RequestKind.RESUME)
    world.until(search.over, 3000)
    assert search.outcomes() == [Outcome.SUCCEEDED, Outcome.STOPPED]


@pytest.mark.parametrize("error", [CorruptError("cut off", "sweeps/lr/state"), StoreError("503")])
def test_a_state_that_cannot_be_read_keeps_only_its_search_waiting(error: Exception) -> None:
    search = Search(count=3)
    world = search.world
    search.submit(0, 1)
    world.until(lambda: search.holds(0) and search.holds(1))
    world.run(120)
    read, reads = world.memory.read_sweep, 0

    def fails(name: str) -> None:
        nonlocal reads
        reads += 1
        raise error

    world.memory.read_sweep = fails  # type: ignore[method-assign, assignment]
    world.may_fail = True
    tick(world.store, world, world, world.options)
    assert 1 <= reads <= 3, "once for the tick, once for each round"
    world.submit(job(9), JobSpec("other", ("train.py",), 1))
    world.until(lambda: world.record(job(9)).over, 3000)
    assert search.holds(0) and search.holds(1)
    world.memory.read_sweep = read  # type: ignore[method-assign]
    search.submit(2)
    world.until(search.over, 3000)
    assert search.outcomes() == [Outcome.SUCCEEDED, Outcome.STOPPED, Outcome.STOPPED]


def test_an_alarm_about_a_searchs_state_does_not_advise_to_delete_it() -> None:
    remedy = CorruptError("cut off", "sweeps/lr/state").remedy
    assert "repair the object" in remedy and "delete" not in remedy


def test_a_tick_reads_a_searchs_state_once() -> None:
    search = Search(count=6, parallel=5, eta=3)
    world = search.world
    search.submit(*range(5))
    world.until(lambda: all(map(search.holds, range(5))))
    world.run(120)
    read, reads = world.memory.read_sweep, 0

    def counted(name: str) -> object:
        nonlocal reads
        reads += 1
        return read(name)

    world.memory.read_sweep = counted  # type: ignore[method-assign, assignment]
    done = tick(world.store, world, world, world.options)
    assert reads == 1 + len(done.rounds) < 5


def just_reached(search: Search) -> None:
    """Train until the processes of trial 0 have ended at the rung, and before the function knows."""
    search.submit(0)
    search.world.until(lambda: any(a.outbox and a.gen and not a.alive for a in search.world.agents(job(0))))
    assert not search.world.events(Event.RUNG, job=job(0))


def test_a_rung_counts_once_every_member_has_ended() -> None:
    search = Search(count=2, nodes=2)
    just_reached(search)
    search.world.member(1, job(0)).agent.hung = True  # type: ignore[union-attr]
    search.world.run(20)
    assert not search.world.events(Event.RUNG, job=job(0)), "node 1 may still be saving"
    search.world.member(1, job(0)).agent.hung = False  # type: ignore[union-attr]
    search.world.until(lambda: search.holds(0))


def test_without_the_machine_of_rank_0_nobody_tells_the_metric() -> None:
    """The others have ended well, but know no value: the next generation reports it."""
    search = Search(count=2, nodes=2)
    search.values[0, 20] = 4.5
    just_reached(search)
    search.world._remove(search.world.member(0, job(0)))
    search.world.until(lambda: search.holds(0), 3000)
    assert search.state().trial(0).values == (4.5,)


def test_a_trial_is_done_only_once_its_search_knows_its_end() -> None:
    search = Search(count=1, rungs=())
    search.submit()
    world = search.world
    world.until(lambda: world.record(job(0)).gen == 1)
    memory, cas = world.memory, world.memory.cas_sweep
    memory.cas_sweep = lambda state, token: None  # type: ignore[method-assign]
    world.until(lambda: world.record(job(0)).phase is Phase.END, 3000)
    world.run(300)
    assert world.record(job(0)).phase is Phase.END, "its report does not come through"
    assert not any(machine.vm.job for machine in world.machines.values()), "its machines do not wait for that"
    read = memory.read_sweep

    def damaged(name: str) -> object:
        raise CorruptError(f"sweeps/{name}/state: not a SweepState", f"sweeps/{name}/state")

    memory.read_sweep = damaged  # type: ignore[assignment, method-assign]
    memory.cas_sweep = cas  # type: ignore[method-assign]
    world.run(300)
    assert world.record(job(0)).phase is Phase.END, "nobody can tell what its search knows"
    memory.read_sweep = read  # type: ignore[method-assign]
    world.until(search.over, 600)
    assert (search.state().trial(0).over, search.state().trial(0).final) == (True, 0.0)


def test_a_job_that_its_search_does_not_name_reports_nothing_and_gets_no_machine() -> None:
    """Any job file may say that it is a trial: only the search's own list makes it one."""
    search = Search(count=2, parallel=2)
    world = search.world
    world.store.create_trial("lr", 0, job(0))
    world.submit("mallory2", replace(search.spec(0), name="mine"))
    world.run(300)
    assert "search lr does not name this job as its trial 0" in world.record("mallory2").reason
    assert not world.inserts() and not search.state().trials
    search.submit()
    world.until(search.over, 3000)
    assert search.outcomes() == [Outcome.SUCCEEDED, Outcome.STOPPED]
    assert {trial.job for trial in search.state().trials} == {job(0), job(1)}
    world.store.put_request("mallory2", JobRequest("r1", RequestKind.CANCEL, world.t, "mallory"))
    world.until(lambda: world.record("mallory2").phase is Phase.DONE, 120)
    assert search.state().trial(0).job == job(0)


def test_a_trial_that_is_named_late_begins_then() -> None:
    search = Search(count=1)
    world = search.world
    world.store.create_trial("lr", 0, "")
    world.submit(job(0), search.spec(0))
    world.run(90)
    assert not world.inserts()
    world.memory.trials["lr"][0] = job(0)
    world.until(search.over, 3000)
    assert search.outcomes() == [Outcome.SUCCEEDED]


def test_a_search_knows_its_trials_when_their_list_is_gone() -> None:
    search = Search(count=2)
    search.submit()
    world = search.world
    world.until(lambda: world.training(job(0)))
    world.memory.trials.clear()
    world.until(search.over, 3000)
    assert search.outcomes() == [Outcome.SUCCEEDED, Outcome.STOPPED]


@pytest.mark.parametrize("rival", ["none", "cancelled", "on hold"])
def test_a_trial_that_competes_with_none_stops_at_no_rung(rival: str) -> None:
    """Each stop costs a save, a start and, on spot, the machine. One on hold may come back, and is compared then."""
    search = Search(count=1 if rival == "none" else 3, eta=3)
    world = search.world
    search.submit()
    if rival != "none":
        world.until(lambda: world.training(job(2)))
        search.request(2, RequestKind.CANCEL if rival == "cancelled" else RequestKind.PAUSE)
    world.until(lambda: world.record(job(0)).phase is Phase.DONE, 3000)
    stops = {"none": [], "cancelled": [20], "on hold": [20, 60]}[rival]
    seen = [entry.detail for entry in world.events(Event.RUNG, job=job(0))]
    assert seen == [f"step {step}: loss 0" for step in stops]
    assert world.record(job(0)).outcome is Outcome.SUCCEEDED
    if rival == "on hold":
        search.request(2, RequestKind.RESUME)
        world.until(lambda: world.record(job(2)).phase is Phase.DONE, 3000)
        assert "not better than the last" in world.record(job(2)).reason
    assert search.state().trial(0).final == 0.0
