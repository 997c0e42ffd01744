"""Trials of a search as whole jobs: they stop at rungs, wait without disks, and the best go on at the same step."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from spotkeeper.contract.facts import Rung
from spotkeeper.contract.job import Checkpoint, JobRequest, JobSpec, Mirror, RequestKind
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Hold, Outcome, Phase
from spotkeeper.contract.stack import Model
from spotkeeper.contract.sweep import Decided, SweepState, Trial, TrialReport
from spotkeeper.reconcile.controller.reconcile_job import Prefetched, run_round
from spotkeeper.reconcile.controller.tick import tick
from spotkeeper.reconcile.decide.gang import rungs
from spotkeeper.reconcile.store.documents import CorruptError
from spotkeeper.reconcile.store.objects import StoreError
from tests.reconcile.world import World, stack

RUNGS = (20, 60)
END = 100


@dataclass
class Search:
    """``count`` trials in one world. The trial with number n reports n at every step, unless ``values`` says else."""

    count: int = 4
    parallel: int = 4
    eta: int = 2
    rungs: tuple[int, ...] = RUNGS
    max_usd: float | None = None
    nodes: int = 1
    world: World = field(init=False)
    values: dict[tuple[int, int], float | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.world = World(self.nodes, the_stack=stack(max_machines=20), steps=END)
        self.world.value = lambda job, step: self.values.get((int(job[-2:]), step), float(int(job[-2:])))

    def spec(self, number: int) -> JobSpec:
        trial = Trial("lr", number, "loss", "min", 0, self.count, self.rungs, self.eta, self.parallel, self.max_usd)
        checkpoint = Checkpoint(mirror=Mirror(every_min=1000.0))
        return JobSpec(f"lr-{number:04d}", ("train.py",), self.nodes, checkpoint=checkpoint, trial=trial)

    def submit(self, *numbers: int) -> None:
        for number in numbers or range(self.count):
            self.world.submit(job(number), self.spec(number))

    def record(self, number: int) -> object:
        return self.world.record(job(number))

    def outcomes(self) -> list[Outcome | None]:
        return [self.world.record(job(number)).outcome for number in range(self.count)]

    def over(self) -> bool:
        return all(self.world.record(job(number)).phase is Phase.DONE for number in range(self.count))

    def holds(self, number: int) -> bool:
        record = self.world.record(job(number))
        return record.phase is Phase.HOLD and record.hold is Hold.RUNG

    def state(self) -> SweepState:
        return self.world.store.read_sweep("lr").value

    def last_steps(self, number: int) -> list[int]:
        return [entry.gen for entry in self.world.events(Event.GENERATION, job=job(number))]


def job(number: int) -> str:
    return f"sweepj{number:02d}"


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
    assert search.state().trial(0).values == (0.0, 0.0)
    assert len(search.world.events(Event.RUNG, job=job(0))) == 2, "each rung is reached once"


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
    search.world.store.put_request(job(0), JobRequest("r1", RequestKind.CANCEL, search.world.t, "ann"))
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
    assert 0.03 <= spent < 0.032, spent
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
    world.store.put_request(job(0), JobRequest("r1", RequestKind.CANCEL, world.t, "ann"))
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
    world.store.put_request(job(0), JobRequest("r1", RequestKind.PAUSE, world.t, "ann"))
    world.copies = copies
    world.until(lambda: world.record(job(0)).phase is Phase.HOLD, rungs.COPY_S + 300)
    assert world.record(job(0)).hold is Hold.PAUSE
    search.submit(1)
    world.until(lambda: world.record(job(1)).over, 3000)
    assert world.record(job(0)).hold is Hold.PAUSE, "its value counts, but it does not go on by itself"
    world.copies = True
    world.store.put_request(job(0), JobRequest("r2", RequestKind.RESUME, world.t, "ann"))
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


# -- trials that hold up their cohort


def request(search: Search, number: int, kind: RequestKind) -> None:
    world = search.world
    world.store.put_request(job(number), JobRequest(f"r{world.t}", kind, world.t, "ann"))


@pytest.mark.parametrize("better", [True, False])
def test_a_paused_trial_keeps_nobody_waiting_and_is_compared_once_it_is_resumed(better: bool) -> None:
    search = Search(count=4)
    search.values |= {(0, 20): 0.0 if better else 2.5}
    search.submit()
    world = search.world
    world.until(lambda: world.record(job(0)).gen == 1)
    request(search, 0, RequestKind.PAUSE)
    world.until(lambda: search.state().decision(0, 1) is not None, 3000)
    assert search.state().decided == (Decided(0, 0, (1, 2, 3), 2), Decided(0, 1, (1, 2), 1))
    assert world.record(job(0)).hold is Hold.PAUSE and search.state().trial(0).held
    request(search, 0, RequestKind.RESUME)
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
    request(search, 0, RequestKind.CANCEL)
    world.until(lambda: world.record(job(0)).phase is Phase.DONE)
    search.submit(2)
    world.until(search.over, 3000)
    assert search.outcomes() == [Outcome.CANCELLED, Outcome.SUCCEEDED, Outcome.STOPPED]
    assert search.state().decision(0, 0) == Decided(0, 0, (1, 2, 0), 1)


@pytest.mark.parametrize("marker", [True, False])
@pytest.mark.parametrize("waits", [True, False])
def test_a_trial_whose_record_was_deleted_keeps_nobody_waiting(waits: bool, marker: bool) -> None:
    search = Search(count=3, eta=3)
    search.submit(0, 1)
    world = search.world
    if waits:
        world.until(lambda: search.holds(0) and search.holds(1))
        world.run(120)
    else:
        world.until(lambda: world.record(job(0)).gen == 1)
    del world.memory.records[job(0)]
    if not marker:
        world.store.clear_active(job(0))
    world.may_fail = True
    if waits:
        world.until(lambda: search.state().trial(0).over, 31 * 60)
    search.submit(2)
    world.until(lambda: all(world.record(job(number)).phase is Phase.DONE for number in (1, 2)), 6000)
    assert [world.record(job(number)).outcome for number in (1, 2)] == [Outcome.SUCCEEDED, Outcome.STOPPED]
    assert search.state().trial(0).over


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
