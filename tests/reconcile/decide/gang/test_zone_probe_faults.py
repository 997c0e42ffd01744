"""What befalls a gang that leaves its zone for money's sake: it never stands still for it, and nothing is left over."""

from __future__ import annotations

from dataclasses import replace as with_

import pytest
from msgspec.structs import replace

from spotkeeper.contract.cloud import Action, CreateDisk, CreateSnapshot, InsertVm, ResultKind
from spotkeeper.contract.job import JobRequest, Nodes, RequestKind
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.market import PriceRun
from spotkeeper.contract.record import PROBE, SlotState, ZoneProbe
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.decide import Times
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.gang import zone_probe
from tests.reconcile.decide.gang.test_resize import trained
from tests.reconcile.decide.gang.test_zone_probe import (
    ELSEWHERE,
    HOME,
    NEXT,
    models,
    moved,
    on_demand,
    probes,
    while_probing,
)
from tests.reconcile.decide.test_decide import NOW, member
from tests.reconcile.decide.test_guards import calm
from tests.reconcile.world import JOB, ZONES, World, stack

SPOT, ON_DEMAND = Model.SPOT, Model.ON_DEMAND


def priced(world: World, home: float, others: float = 0.3) -> None:
    """Dollars an hour of spot; on-demand is 1."""
    world.prices["pool"] = tuple(PriceRun(0.0, home if zone == HOME else others, zone) for zone in ZONES)


def on_spot(**more: object) -> World:
    world = World(**({"nodes": 1} | more))
    priced(world, 0.3)
    return trained(world)


def asked(world: World, model: Model) -> list[float]:
    return [at for at, action, _ in world.made if isinstance(action, InsertVm) and action.model is model]


def test_a_cancelled_move_uses_no_machine_of_the_other_zone_as_replacement() -> None:
    world = on_demand(nodes=1)
    world.until(lambda: world.record().move is not None, 900)
    world.preempt(0, 120.0)
    world.run(1)
    world.request(RequestKind.MOVE, zone=HOME)
    world.until(lambda: world.record().move is None, 30)
    world.until(world.training, 600)
    assert {machine.vm.zone for machine in world.dynamic()} == {world.record().zone}


def test_policy_spot_never_buys_on_demand() -> None:
    world = on_spot(policy="spot")
    priced(world, 1.4, 1.4)
    world.run(4500)
    assert asked(world, ON_DEMAND) == [] and world.training()


@pytest.mark.parametrize("full", ["pool", "job", "caps", "sold out"])
def test_without_on_demand_expensive_spot_is_left_for_another_zone(full: str) -> None:
    world = on_spot(
        **({"max_on_demand": 0} if full == "job" else {}),
        the_stack=stack(max_on_demand=0) if full == "pool" else stack(),
    )
    world.prices.clear()
    priced(world, 1.4)
    if full == "caps":
        world.stack = world.memory.stack = stack(max_machines=1)
    if full == "sold out":
        world.capacity |= {(zone, ON_DEMAND): 0 for zone in ZONES}
    world.run(4500)
    if full == "caps":  # neither has room
        assert world.training() and [node.replace_reason for node in world.record().nodes] == [None]
    else:
        assert models(world) == {SPOT} and world.record().zone in ELSEWHERE


def test_refused_on_demand_is_not_requested_in_every_round() -> None:
    world = on_spot(nodes=2)
    world.capacity |= {(zone, ON_DEMAND): 0 for zone in ZONES}
    gen = world.record().gen
    priced(world, 1.4, 1.4)
    world.run(4500)
    times = Times()
    assert 1 <= len(asked(world, ON_DEMAND)) <= 2 * (4500 / times.cold_s + 1)
    assert world.record().gen == gen and world.training()


def test_probes_leave_launches_for_losses() -> None:
    """Spot is there in the other zones and not worth it, so each is looked at again and again."""
    world = World(nodes=1, times=Times(launches_node=6, launches_job=0))
    priced(world, 0.3, 0.97)
    trained(world)
    world.capacity[HOME, SPOT] = 0
    world.preempt(0)
    world.until(lambda: world.training() and models(world) == {ON_DEMAND}, 900)
    world.run(2400)
    assert probes(world), "else this proves nothing"
    world.preempt(0)
    world.until(world.training, 400)


def test_no_move_begins_while_the_own_zone_is_silent() -> None:
    world = while_probing(nodes=1)
    gen = world.record().gen
    world.blind = {HOME}
    world.run(240)
    assert world.record().move is None and world.record().gen == gen and world.training()
    world.blind = set()
    world.until(lambda: moved(world) != [] or len(world.dynamic()) == 1, 300)


@pytest.mark.parametrize(
    ("answered", "waited_s", "stays"),
    [
        ((HOME,), Times().settle_s - 1, True),
        ((HOME,), Times().settle_s, False),
        ((NEXT,), Times().settle_s - 1, True),
        ((HOME, NEXT), 0.0, False),  # the offer is no better than the gang's machines
    ],
)
def test_booted_probes_wait_a_while_for_a_zone_that_does_not_answer(
    answered: tuple[str, ...], waited_s: float, stays: bool
) -> None:
    record, seen = calm(2)
    ready = {"zone": NEXT, "state": SlotState.ADMITTED, "cause": PROBE}
    waits = [member(n, 2, since=NOW - waited_s - (100 if n else 0), **ready) for n in range(2)]
    nodes = tuple(replace(node, next=slot, top=2) for node, slot in zip(record.nodes, waits, strict=True))
    seen = with_(seen, listing=replace(seen.listing, answered=frozenset(answered)))
    draft = Draft(replace(record, nodes=nodes, probes=(ZoneProbe(NEXT, NOW - 100, 2),)), seen)
    zone_probe.settle(draft)
    assert [node.next for node in draft.nodes] == (waits if stays else [None, None])
    assert draft.record.move is None


def test_one_refused_probe_releases_the_others() -> None:
    """Of two probes, one is left: it is not taken for one that was sent alone."""
    world = on_demand(nodes=2, boot_s=90.0)
    world.capacity |= {(NEXT, SPOT): 1, (ZONES[2], SPOT): 0}
    world.until(lambda: bool(probes(world)), 600)
    world.run(60)
    assert {machine.vm.zone for machine in world.dynamic()} == {HOME}


def test_machines_lost_during_a_move_leave_nothing_behind() -> None:
    world = on_demand(nodes=2)
    world.shot_s = 60.0
    world.until(lambda: world.record().move is not None, 900)
    for machine in world.dynamic():
        if machine.vm.zone == NEXT:
            world._remove(machine)
    world.capacity[NEXT, SPOT] = 0
    world.until(lambda: world.record().move is None and world.training(), 2400)
    world.run(300)
    assert len(world.dynamic()) == 2 and len(world.drives) == 2 and not world.shots


@pytest.mark.parametrize("what", [CreateDisk, CreateSnapshot])
@pytest.mark.parametrize(
    ("kind", "said", "why"),
    [(ResultKind.PERMANENT, "", "permanent"), (ResultKind.QUOTA, "SSD_TOTAL_GB", "SSD_TOTAL_GB")],
)
def test_a_gang_with_uncopyable_disks_stays_and_retries_at_growing_intervals(
    what: type, kind: ResultKind, said: str, why: str
) -> None:
    world = on_demand(nodes=2)
    perform = world._perform

    def refusing(action: Action) -> tuple[ResultKind, str]:
        copy = isinstance(action, CreateSnapshot) or (isinstance(action, CreateDisk) and action.snapshot)
        return (kind, said) if copy and isinstance(action, what) else perform(action)

    world._perform = refusing
    world.until(lambda: world.record().move is not None, 900)
    world.until(lambda: world.training() and world.record().move is None, 600)
    world.run(4 * 3600)
    assert world.record().zone == HOME and world.training() and not world.shots
    assert sum(" -> " in told for told in moved(world)) <= 6
    assert {told for told in moved(world) if " -> " not in told} == {why}


def test_a_smaller_job_does_not_count_parked_nodes_as_a_loss() -> None:
    """Three nodes on spot for half of on-demand's price, with a step that takes as long as one node's."""
    world = World(nodes=Nodes(1, 3))
    world.step_s, world.loop_steps = 1.0, 4 * 3600
    priced(world, 0.5, 0.5)
    trained(world)
    world.run(3 * 3600)
    world.request(RequestKind.RESIZE, nodes=1)
    world.until(lambda: world.training() and len(world.record().members) == 1, 300)
    world.run(120)
    world.preempt(0)
    world.until(world.training, 300)
    assert models(world) == {SPOT}, world.events(Event.INTENT)[-1].detail


def test_a_node_that_requests_a_replacement_is_not_probed_for_a_requested_move_as_well() -> None:
    """One attempt number cannot have two grants. Node 0 is lost while node 1 has a notice, and the move waits."""
    world = on_spot(nodes=2)
    world.store.put_request(JOB, JobRequest("0123456789ab", RequestKind.MOVE, world.t, "user", zone=NEXT))
    world.preempt(0)
    world.preempt(1, 120.0)
    world.run(1)  # one round reads all three, and the world checks that no grant is doubled
    assert world.record().asked_zone is not None
    assert world.record().nodes[0].cur != world.record().nodes[1].next is not None
    world.until(lambda: world.training() and world.record().asked_zone is None, 2400)
