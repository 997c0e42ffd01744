"""The ledger adds up to the bill, wherever the function is killed: no machine is missing, none is paid twice.

The bill is kept by the simulated cloud for itself, from a machine's first second to its last. A slice of the points
here; bench/market/ledger.py walks more of them, and the one-machine cloud's own bill.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from spotkeeper.contract.generation import Progress
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.names import parse_vm_name, vm_name
from spotkeeper.contract.stack import StackState
from spotkeeper.report.job.view import job_view
from spotkeeper.report.money.account import account
from spotkeeper.report.money.money import HOUR_S, attempts, money
from tests.sim.ec2 import on_ec2
from tests.sim.gang import Gang
from tests.sim.scenarios import JOB, SCENARIOS, Scenario, perform
from tests.sim.test_crash_points import effects, kill
from tests.sim.world import World
from tests.sizes import size

PERCENT = 1.0
EVERY = size(46, 23)  # effects; each story begins at another


@dataclass(frozen=True)
class Books:
    """Of one play. ``billed``, ``said``: USD, with transfers between regions, which are ``moved`` and ``told`` too."""

    world: World
    entries: tuple[Entry, ...]
    billed: float
    said: float
    moved: float = 0.0
    told: float = 0.0

    @property
    def error_percent(self) -> float:
        return 100.0 * abs(self.said - self.billed) / self.billed if self.billed else 0.0


def books(
    scenario: Scenario, at: int | None = None, on: Callable[[StackState], StackState] = lambda stack: stack
) -> Books:
    """Of a story in which the function is killed at this point; None: nowhere. ``on``: the cloud."""
    worlds: list[World] = []

    def interfere(world: World) -> None:
        worlds.append(world)
        if at is not None:
            kill(at)(world)

    assert perform(scenario, interfere, on=on).why == ""
    (world,) = worlds
    entries = (*world.store.list_ledger(JOB), *world.record(JOB).outbox)
    prices = {pool.name: pool.prices for pool in world.stack.pools}
    egress = sum(world.stack.egress_usd(one.source, one.target, one.gb) for one in world.cloud.transfers)
    billed = egress + sum(
        (one.end - one.start) / HOUR_S * (prices[one.vm.pool][one.vm.zone].of(one.vm.model) or 0.0)
        for one in world.cloud.bill
        if one.vm.job == JOB
    )
    told = money(entries, world.stack, world.engine.t)
    return Books(world, entries, billed, told.spent, egress, told.egress)


def sliced(scenario: Scenario) -> list[int | None]:
    first = SCENARIOS.index(scenario)
    return [None, *effects(perform(scenario))[first::EVERY]]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_the_ledger_equals_the_bill_wherever_the_function_is_killed(scenario: Scenario) -> None:
    for at in sliced(scenario):
        found = books(scenario, at)
        assert found.billed > 0
        assert found.error_percent <= PERCENT, at


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_every_machine_and_every_paid_second_is_in_the_account(scenario: Scenario) -> None:
    found = books(scenario)
    world, now = found.world, found.world.engine.t
    view = job_view(world.record(JOB), None, found.entries, world.stack, now)
    told = account(view, found.entries, now)
    paid = {(line.node, line.attempt) for line in told.attempts if line.hours > 0}
    owned = [parse_vm_name(one.vm.name) for one in world.cloud.bill if one.vm.job == JOB]
    assert paid == {(one.node, one.number) for one in owned if one is not None}
    assert told.goodput is not None
    lost = sum(line.node_hours for line in told.lost)
    assert lost + told.goodput * told.node_hours == pytest.approx(told.node_hours)
    assert all(line.ended for line in told.attempts)


@pytest.mark.parametrize("name", ["notice", "silent loss", "master loss", "user crash", "zone move"])
def test_repeated_steps_are_counted_correctly(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reckoned from reports a minute apart; the simulated gang knows them exactly."""
    real = Gang.progress

    def progress(self: Gang) -> Progress | None:
        told = real(self)
        return None if told is None else replace(told, step_s=self.job.step_s)

    def report(self: World, job: str) -> None:
        """With the last word of the lowest member's agent, which simulated ones do not say."""
        told(self, job)
        run = self.jobs.get(job)
        if run is None:
            return
        gang, last = run.gang(), self.store.progresses.get(job)
        lives = self.member(job, 0) is not None
        if gang is not None and gang.over and lives and last is not None and last.gen == gang.gen:
            self.store.put_progress(job, replace(last, step=run.reached))

    told = World.report
    monkeypatch.setattr(Gang, "progress", progress)
    monkeypatch.setattr(World, "report", report)
    found = books(next(one for one in SCENARIOS if one.name == name))
    again = sum(entry.again or 0 for entry in found.entries if entry.event is Event.GENERATION)
    assert again == pytest.approx(sum(steps for _, steps in found.world.jobs[JOB].lost), abs=2)


@pytest.mark.parametrize("name", ["notice", "silent loss", "two losses"])
def test_on_ec2_every_machine_is_paid_once_by_ec2s_times(name: str) -> None:
    """EC2 tells when a machine was ordered, seconds before it runs, and when a call or the market ended it, seconds
    before it is off: the look that finds it gone, a tick later where the function was killed, makes no difference.
    """
    scenario = next(one for one in SCENARIOS if one.name == name)
    points = effects(perform(scenario, on=on_ec2))
    for at in (None, points[len(points) // 3]):
        found = books(scenario, at, on_ec2)
        told = {
            vm_name(found.world.stack.stack, JOB, one.node, one.attempt): one.span(found.world.engine.t)
            for one in attempts(found.entries)
        }
        assert {name for name, (start, end) in told.items() if end > start} == {
            one.vm.name for one in found.world.cloud.bill
        }, at
        for one in found.world.cloud.bill:
            start, end = told[one.vm.name]
            assert -30.0 <= start - one.start <= 0.0, (at, one.vm.name)
            assert -30.0 <= end - one.end <= 0.0, (at, one.vm.name)


def test_without_the_clouds_times_the_ledger_is_inexact() -> None:
    """What the looks alone tell: a machine's end as late as it was looked for. Else the test above could not fail."""
    scenario = next(one for one in SCENARIOS if one.name == "silent loss")
    found = books(scenario)
    blind = tuple(replace(one, started=None, ended=None) if one.event is Event.GONE else one for one in found.entries)
    said = money(blind, found.world.stack, found.world.engine.t).spent
    assert abs(said - found.billed) > found.billed * PERCENT / 100
