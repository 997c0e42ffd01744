"""A script that saves by itself (``stop: signal``): nobody knows what it has saved, so each node keeps to its disk."""

from __future__ import annotations

from spotkeeper.contract.cloud import VmStatus
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.decide import Times
from tests.reconcile.world import ZONES, World

GRACE_S = 70.0


def trained(stop: str) -> World:
    world = World(nodes=2, static="never", stop=stop, grace_s=GRACE_S)
    world.submit()
    world.until(world.training, 300)
    world.run(40)
    return world


def test_a_generation_waits_for_every_disk() -> None:
    """With the library, another node's copy would do; here this node would begin anew beside one that does not."""
    world = trained("signal")
    gone = world.preempt(1)
    drive = next(drive for drive in world.drives.values() if drive.disk.node == 1)
    drive.user = gone.vm.uid  # the cloud is slow to let go
    world.machines[gone.vm.uid] = gone
    gone.status, gone.agent, gone.dies_at = VmStatus.STOPPING, None, world.t + 100
    world.run(90)
    assert world.record().gen == 1 and not world.training()
    world.until(lambda: world.record().gen == 2 and world.training(), 300)
    assert all(node.cur is not None and node.cur.disk for node in world.record().nodes)


def stopped_before(stop: str) -> float:
    """Seconds between the word to stop and the end of a machine whose successor is not there in time."""
    world = trained(stop)
    world.capacity = {(zone, model): 0 for zone in ZONES for model in (Model.SPOT, Model.ON_DEMAND)}
    world.preempt(1, 120.0)
    ends = world.t + 120.0
    world.until(lambda: world.record().stop, 120)
    assert world.events(Event.STOP)
    return ends - world.t


def test_a_notice_stops_the_job_in_time_for_the_grace_period() -> None:
    assert stopped_before("signal") >= GRACE_S
    assert stopped_before("library") < Times().save_s + Times().margin_s + 10, "there a save's own time is known"
