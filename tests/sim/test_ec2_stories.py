"""The thirteen stories on EC2: the function as shipped, its adapter, botocore, and the strict stand-in.

As on Compute Engine (``test_crash_points.py``, where the faults are explained), the process is killed and frozen at
every effect, every request in turn is missed, every look shows old listings. A play takes half a second here, so
``make test`` has each story undisturbed, and half of them with one fault; all of them: ``make ec2``.
"""

from __future__ import annotations

from collections.abc import Callable
from uuid import uuid4

import pytest
from msgspec.structs import replace

from spotkeeper.contract import names
from spotkeeper.contract.cloud import ResultKind
from spotkeeper.contract.stack import Model, ReservedCapacity, StackState
from spotkeeper.reconcile.clouds.ec2 import schema
from spotkeeper.reconcile.clouds.ec2.actions import Ec2Verbs
from spotkeeper.reconcile.clouds.ec2.schema import InstanceIn
from tests.reconcile.clouds.ec2.standin.site import Fault
from tests.sim.ec2 import Ec2Cloud, on_ec2
from tests.sim.engine import START
from tests.sim.scenarios import ROUGH, SCENARIOS, Play, Scenario, Told, perform
from tests.sim.test_crash_points import LEAST, LEAST_OF_ALL, effects, freeze, kill, lose, show_old
from tests.sim.world import ZONES, World
from tests.sizes import WHOLE

each = pytest.mark.parametrize("scenario", SCENARIOS, ids=[scenario.name for scenario in SCENARIOS])
whole = pytest.mark.matrix
pytestmark = pytest.mark.timeout(3600)  # a cell of the matrix is up to 200 plays, on however busy a machine
BOOT_S = 480.0  # the deadline of a boot


def well(scenario: Scenario) -> Told:
    told = perform(scenario, on=on_ec2)
    assert told.why == ""
    assert len(effects(told)) >= LEAST
    return told


def why(scenario: Scenario, interfere: Callable[[World], None], **more: object) -> str:
    return perform(scenario, interfere, on=on_ec2, **more).why  # type: ignore[arg-type]


@each
def test_a_story_ends_well_with_and_without_a_kill(scenario: Scenario) -> None:
    """At one of its effects, another for each story; in every third one it freezes there instead."""
    points, number = effects(well(scenario)), SCENARIOS.index(scenario)
    if WHOLE or number % 2 == 0:
        stop = freeze if number % 3 == 2 else kill
        assert why(scenario, stop(points[(7 * number + 3) % len(points)])) == ""


@whole
def test_there_are_as_many_points_as_on_compute_engine() -> None:
    assert sum(len(effects(well(scenario))) for scenario in SCENARIOS) >= LEAST_OF_ALL


@whole
@each
def test_a_function_killed_at_every_effect_recovers(scenario: Scenario) -> None:
    assert {at: told for at in effects(well(scenario)) if (told := why(scenario, kill(at)))} == {}


@whole
@each
def test_a_function_frozen_at_every_effect_recovers(scenario: Scenario) -> None:
    assert {at: told for at in effects(well(scenario)) if (told := why(scenario, freeze(at)))} == {}


@whole
@each
def test_every_request_may_be_lost(scenario: Scenario) -> None:
    requests = range(well(scenario).requests)
    assert {number: told for number in requests if (told := why(scenario, lose(number)))} == {}


@whole
@each
def test_every_listing_may_be_stale(scenario: Scenario) -> None:
    seen = {}
    for look in range(well(scenario).looks):
        for versions in (1, 2, 3):
            if told := why(scenario, show_old(look, versions), lost=scenario.lost + ROUGH, but="S4"):
                seen[look, versions] = told
    assert seen == {}


# -- what only EC2 does to a story


def _born_dead(play: Play) -> None:
    """The market takes every machine of the first three seconds before it is visible."""
    cloud = play.world.cloud
    assert isinstance(cloud, Ec2Cloud)

    def preempt() -> None:
        for instance in list(cloud.site.instances.values()):
            cloud.site.stop(instance, ("Server.SpotInstanceTermination", "taken"), 0.5)

    for moment in (0.5, 1.5, 3.0):
        play.world.engine.after(moment, preempt)


BORN_DEAD = Scenario("born dead", _born_dead, lambda play: play.on, fresh=True)


def test_a_dead_token_costs_one_attempt() -> None:
    """Rule 7: EC2 gives that machine for as long as a day."""

    def refused(world: World) -> None:
        world.cloud.site.strict_tokens = True  # type: ignore[attr-defined]

    assert why(BORN_DEAD, lambda _: None) == ""
    assert why(BORN_DEAD, refused) == "", "or says that it was terminated"


def test_refused_lost_and_throttled_calls_only_cost_time() -> None:
    def trouble(world: World) -> None:
        cloud = world.cloud
        assert isinstance(cloud, Ec2Cloud)
        cloud.site.faults += [
            Fault("RunInstances", "InternalError", 500, times=2),
            Fault("RunInstances", done=True, times=2),
            Fault("DescribeInstances", "RequestLimitExceeded", 503, times=3),
            Fault("DescribeVolumes", times=2),
            Fault("CreateVolume", done=True, times=2),
            Fault("AttachVolume", done=True, times=1),
            Fault("TerminateInstances", "Unavailable", 503, times=2),
        ]

    for name in ("start", "silent loss"):
        assert why(next(s for s in SCENARIOS if s.name == name), trouble) == ""


def _trains_in_its_block(play: Play) -> None:
    assert play.models() == {Model.RESERVED}


def in_a_block(stack: StackState) -> StackState:
    """The same stack on AWS, with a capacity block for a gang of two."""
    declared = on_ec2(stack)
    (pool,) = declared.pools
    block = ReservedCapacity("cr-0123456789abcdef0", ZONES[1], 2, ends=START + 2400.0, block=True)
    return replace(declared, pools=(replace(pool, reservations=(block,)),))


BLOCK = Scenario("a capacity block ends", _trains_in_its_block, lambda play: play.on and play.models() == {Model.SPOT})


def test_a_job_leaves_a_capacity_block_before_ec2_ends_it() -> None:
    """No step is lost, also where the function is killed on the way."""
    told = perform(BLOCK, on=in_a_block)
    assert told.why == "" and told.took_s < 2400.0 - 10 * 60.0, "long before its machines are terminated"
    points = effects(told)
    assert perform(BLOCK, kill(points[len(points) // 2]), on=in_a_block).why == ""


# -- what is broken is seen


def test_a_dead_token_taken_for_a_machine_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that never says hello is given up after eight minutes instead of at once."""
    assert perform(BORN_DEAD, on=on_ec2).took_s < BOOT_S
    monkeypatch.setattr(Ec2Verbs, "_launched", lambda self, made, ends: (ResultKind.ACCEPTED, made.instance_id))
    assert perform(BORN_DEAD, on=on_ec2).took_s > BOOT_S


def test_launches_with_a_shared_token_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch whose answer is lost, twice, is asked for again: without its token that is another machine."""
    start = SCENARIOS[0]
    launched: list[int] = []

    def count(world: World) -> None:
        launched.append(0)
        world.cloud.site.faults.append(Fault("RunInstances", done=True, times=2))  # type: ignore[attr-defined]
        world.cloud.site.delays.seen = (70.0, 70.0)  # type: ignore[attr-defined]  # not before a tick
        real = world.cloud.site.launch  # type: ignore[attr-defined]

        def launch(instance: object) -> None:
            launched[-1] += 1
            real(instance)

        world.cloud.site.launch = launch  # type: ignore[attr-defined]

    assert why(start, count) == ""
    monkeypatch.setattr(names, "idempotency_key", lambda *_: str(uuid4()))
    why(start, count)
    assert launched[0] == 2 < launched[1]


def test_a_terminated_machine_taken_for_a_live_one_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    real = schema.to_vm

    def to_vm(item: InstanceIn, *more: object, **named: object) -> object:
        return real(item, *more, **{**named, "ended": True})  # type: ignore[arg-type]

    monkeypatch.setattr(schema, "to_vm", to_vm)
    assert why(SCENARIOS[0], lambda _: None) != ""
