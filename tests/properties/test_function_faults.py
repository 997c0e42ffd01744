"""The function's own life: it fails, is out of reach, is deployed anew in the middle, meets a newer record, is
throttled, has a wrong clock. Training goes on, nothing is deleted while it is blind, and its first healthy
tick repairs.

Real ticks and rounds against the one-machine cloud's control plane. What the real agent does when the function
is out of reach for longer than the lease is in ``tests/agent/agent/test_agent.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from spotkeeper.contract.record import Phase
from spotkeeper.reconcile.decide import Times
from tests.properties.actors import Plan, no_threads
from tests.properties.plane import Still
from tests.properties.world import JOBS, TICK_S, World
from tests.sizes import size

JOB = JOBS[0]
HOUR = 3600


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    no_threads(monkeypatch)
    made = training_world()
    yield made
    made.close()


def training_world() -> World:
    world = World()
    world.submit(JOB)
    world.until(lambda: world.training(JOB), "training")
    world.advance(30)
    return world


class Watch:
    """What changed since: machines, disks, generation, attempts."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.before = self.look()
        self.steps = self.step()

    def look(self) -> tuple[object, ...]:
        record = self.world.record(JOB)
        vms = sorted((vm.name, vm.id) for vm in self.world.plane.vms())
        disks = sorted((disk.name, disk.id) for disk in self.world.plane.disks())
        return vms, disks, record.gen, [node.cur and node.cur.attempt for node in record.nodes]

    def step(self) -> int:
        return min((guest.step_no for guest in self.world.guests.values() if guest.alive), default=-1)

    def untouched(self) -> bool:
        return self.look() == self.before

    def trained(self, seconds: int) -> bool:
        return self.step() - self.steps >= 0.9 * seconds


def healthy_tick(world: World) -> None:
    world.next_tick = world.now
    world.advance(1)


def down_function(world: World) -> None:
    world.function_down = True


def down_bucket(world: World) -> None:
    world.bucket.weather.down = True


def down_cloud(world: World) -> None:
    world.line.down = True


def throttled_bucket(world: World) -> None:
    world.bucket.weather.throttled = 10**9


def throttled_cloud(world: World) -> None:
    world.line.throttled = 10**9


def unanswered_zones(world: World) -> None:
    for zone in world.stack.zones():
        world.plane.partition(zone, True)


Break = Callable[[World], None]
FAILURES: tuple[Break, ...] = (down_function, down_bucket, down_cloud, throttled_bucket, throttled_cloud)


# -- failing for long: an hour in `make stories`


@pytest.mark.parametrize("fail", [*FAILURES, unanswered_zones], ids=lambda fail: fail.__name__)
def test_training_continues_while_the_function_fails(world: World, fail: Break) -> None:
    watch, outage = Watch(world), size(HOUR // 20, HOUR)
    fail(world)
    world.advance(outage)
    assert watch.untouched(), "blind, it decides nothing"
    assert watch.trained(outage)
    world.calm()
    healthy_tick(world)
    world.advance(120)
    assert watch.untouched() and watch.trained(outage + 120), "and nothing needs repair"


@pytest.mark.parametrize("fail", [*FAILURES, unanswered_zones], ids=lambda fail: fail.__name__)
def test_the_first_healthy_tick_repairs_losses_of_an_outage(world: World, fail: Break) -> None:
    watch = Watch(world)
    fail(world)
    world.advance(60)
    world.plane.preempt(world.plane.vms()[0], notice=False)
    world.advance(size(HOUR // 24, HOUR) - 60)
    assert world.record(JOB).gen == 1 and len(world.plane.disks()) == 2
    world.calm()
    asked = len(world.launches[JOB, 0]) + len(world.launches[JOB, 1])
    healthy_tick(world)
    assert len(world.launches[JOB, 0]) + len(world.launches[JOB, 1]) == asked + 1, "one tick, one replacement asked for"
    world.until(lambda: world.training(JOB), "training again")
    assert world.record(JOB).gen == 2
    assert [disk.id for disk in world.plane.disks()] == [number for _, number in watch.before[1]], "the same disks"
    world.settle()


@pytest.mark.parametrize("fail", FAILURES, ids=lambda fail: fail.__name__)
def test_the_function_may_fail_during_a_recovery(world: World, fail: Break) -> None:
    world.plane.preempt(world.plane.vms()[0], notice=False)
    world.advance(20)
    fail(world)
    world.advance(size(120, 600))
    assert len(world.plane.disks()) == 2, "no disk is given up"
    world.calm()
    world.until(lambda: world.training(JOB), "training again")
    world.settle()


# -- unreachable beyond the lease


def test_beyond_the_lease_machines_save_and_power_off(world: World) -> None:
    world.function_down = True
    world.advance(world.stack.lease_minutes * 60 - 60)
    assert all(guest.alive for guest in world.guests.values()) and len(world.guests) == 2
    world.advance(90)
    assert world.guests == {}, "every machine has powered itself off"
    assert [vm.wire.status for vm in world.plane.vms()] == ["TERMINATED"] * 2, "and is not paid"
    saved = dict(world.commits)
    assert len(saved) == 2 and min(step for _, step in saved.values()) > 7000, "saved at the lease's end"
    world.advance(HOUR)
    world.calm()
    disks = sorted(disk.id for disk in world.plane.disks())
    world.until(lambda: world.training(JOB), "resumed")
    assert sorted(disk.id for disk in world.plane.disks()) == disks
    held = {guest.mounted: saved[guest.mounted or ""] for guest in world.guests.values()}
    assert held == saved, "from the checkpoint that each disk holds"
    assert {vm.wire.status for vm in world.plane.vms()} == {"RUNNING"}, "the old machines are gone"
    world.settle()


# -- deployed in the middle of a recovery


@pytest.mark.parametrize("at", size(range(4, 120, 40), range(1, 120, 6)))
def test_old_code_and_new_code_interleave_in_the_middle_of_a_recovery(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """The old deployment's round stops somewhere, the new one's go on, then the old one makes its late calls.

    The new code has other opinions: of how long things may take, and of what is cheap.
    """
    no_threads(monkeypatch)
    world = training_world()
    old, new = 0, 1
    world.instances[new].options.times = Times(
        stop_s=5.0, roll_s=10.0, lone_roll_s=10.0, free_s=0.0, cold_s=1.0, save_s=1.0
    )
    world.plane.preempt(world.plane.vms()[0], notice=False)
    world.advance(5)
    world.function_down = True  # nobody but the two
    world.round(JOB, Plan(freeze_at=at, thaw_after=10**6), old)
    for key in [key for key in world.bucket.blobs if key.endswith("/lease")]:
        del world.bucket.blobs[key]
    world.prices(3.0)
    for _ in range(6):
        world.round(JOB, instance=new)
        world.advance(10)
    world.thaw()
    world.function_down = False
    world.until(lambda: world.training(JOB), "training again")
    world.settle()
    world.close()


# -- older than the record's version


def test_a_newer_records_job_is_left_alone(world: World) -> None:
    world.submit(JOBS[1])
    world.until(lambda: world.training(JOBS[1]), "the other job")
    watch = Watch(world)
    key = f"jobs/{JOB}/rec"
    body = world.bucket.blobs[key][0]
    newer = body.replace(b'{"v":1,', b'{"v":2,"news":true,')
    world.bucket.plant(key, newer)
    lost = next(vm for vm in world.plane.vms() if JOB in vm.name)
    world.advance(outage := size(HOUR // 6, HOUR // 2))
    assert watch.untouched(), "its machines and disks stay"
    assert watch.trained(outage), "and train"
    world.plane.preempt(lost, notice=False)
    world.plane.preempt(next(vm for vm in world.plane.vms() if JOBS[1] in vm.name), notice=False)
    world.until(lambda: world.record(JOBS[1]).gen == 2 and world.training(JOBS[1]), "the job beside it is served")
    assert world.bucket.blobs[key][0] == newer, "nobody wrote over it"
    assert not [vm for vm in world.plane.vms() if JOB in vm.name and vm.name == lost.name]
    world.bucket.plant(key, body)  # the newer function is deployed again
    healthy_tick(world)
    world.until(lambda: world.training(JOB), "the first healthy ticks repair")
    world.settle()


# -- its clock is wrong


def wrong(world: World, skew: float) -> None:
    for index, instance in enumerate(world.instances):
        clock = Still(time=world.time, skew=skew)
        world.instances[index] = type(instance)(clock, instance.cloud, instance.options)


@pytest.mark.parametrize("skew", [10.0, -10.0, 300.0, -300.0, 3 * HOUR, -3 * HOUR])
def test_a_wrong_clock_gives_up_no_member_and_no_disk(world: World, skew: float) -> None:
    watch = Watch(world)
    wrong(world, skew)
    world.advance(span := size(400, 1200))
    assert watch.untouched() and watch.trained(span)
    wrong(world, 0.0)
    world.advance(span)
    assert watch.untouched() and watch.trained(2 * span), "nor when it is right again"


@pytest.mark.parametrize("skew", [10.0, -10.0, 3 * HOUR, -3 * HOUR])
def test_one_instance_may_have_a_wrong_clock_during_a_recovery(world: World, skew: float) -> None:
    clock = Still(time=world.time, skew=skew)
    world.instances[1] = type(world.instances[1])(clock, world.instances[1].cloud, world.instances[1].options)
    world.plane.preempt(world.plane.vms()[0], notice=False)
    disks = sorted(disk.id for disk in world.plane.disks())
    for _ in range(10):
        world.tick(instance=1)
        world.advance(int(TICK_S) // 2)
    assert sorted(disk.id for disk in world.plane.disks()) == disks
    wrong(world, 0.0)
    world.until(lambda: world.training(JOB), "training again")
    assert world.record(JOB).phase is Phase.RUN
    world.settle()
