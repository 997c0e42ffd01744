"""A disk that cannot be mounted: the machine is suspect first and replaced, then the disk is, and the job holds."""

from __future__ import annotations

from spotkeeper.contract.job import RequestKind
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Hold, Phase
from spotkeeper.report.job.events import describe
from tests.reconcile.world import JOB, World, stack


def test_a_machine_that_cannot_mount_the_disk_is_replaced_and_training_goes_on_from_the_disk() -> None:
    world = World(nodes=2)
    world.submit()
    world.until(world.training, 200)
    world.run(60)
    # What comes next for node 0 is a machine whose device never appears.
    world.preempt(0)
    world.until(lambda: world.record().nodes[0].cur is not None and len(world.inserts()) == 3, 100)
    new = next(m for m in world.machines.values() if m.vm.node == 0 and m.vm.attempt == 2)
    world.clumsy.add(new.vm.uid)
    world.until(lambda: world.training() and world.record().nodes[0].top == 3, 600)
    record = world.record()
    assert record.phase is Phase.RUN and record.nodes[0].bad == 0, "it was the machine: the next one mounted it"
    assert record.budget.crashes == 0
    assert record.budget.preemptions == 1, "a bad disk is no preemption, and no word about the market"
    (lost,) = [entry for entry in world.events(Event.LOSS) if entry.attempt == 2]
    assert lost.cause == "disk" and "disk" in describe(lost)
    world.run(3)
    assert world.started[-1][1] is not None


def test_a_disk_that_no_machine_can_mount_holds_the_job_with_its_name_and_is_never_deleted() -> None:
    world = World(nodes=1)
    world.submit()
    world.until(world.training, 200)
    world.run(60)
    for drive in world.drives.values():
        drive.broken = True
    world.preempt(0)
    world.until(lambda: world.record().phase is Phase.HOLD, 1500)
    record = world.record()
    assert record.hold is Hold.CLOUD
    assert record.reason.startswith(f"node 0: sk-t-{JOB}-n0000-d0 cannot be mounted (mount), on 3 machines in a row")
    assert record.nodes[0].top == 4 and record.budget.crashes == 0
    world.run(200)
    assert world.dynamic() == [] and len(world.drives) == 1, "machines are given back, the disk stays"
    for drive in world.drives.values():  # a person has corrected it
        drive.broken = False
    world.request(RequestKind.RESUME)
    world.until(world.training, 300)
    world.run(3)
    assert world.started[-1][1] is not None, "from the checkpoint on it"


def test_a_faulty_disk_of_a_static_machine_holds_the_job() -> None:
    world = World(nodes=1, the_stack=stack(static=1), pools=("fix",))
    world.run(10)
    world.submit()
    world.until(world.training, 200)
    for drive in world.drives.values():
        drive.broken = True
    world.reboot(0)
    world.until(lambda: world.record().phase is Phase.HOLD, 2500)
    assert "the disk of sk-t-fix-s0 cannot be mounted" in world.record().reason
