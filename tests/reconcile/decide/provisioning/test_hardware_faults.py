"""Broken hosts: the second crash with a sign of broken hardware on a machine replaces it, without the crash budget."""

from __future__ import annotations

from spotkeeper.contract.cloud import VmStatus
from spotkeeper.contract.job import Retry
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Phase
from spotkeeper.report.job.recovery import preemptions
from spotkeeper.report.job.view import job_view
from tests.reconcile.controller.test_round import causes, trained
from tests.reconcile.world import World


def crashed(world: World, times: int = 1) -> None:
    """So many generations in a row end by a crash, and the job trains again."""
    for _ in range(times):
        world.run(30)
        gen, world.crashing = world.record().gen, 1
        world.until(lambda gen=gen: world.record().gen > gen and world.training(), 400)  # type: ignore[misc]


def test_the_first_crash_counts_and_the_second_on_that_machine_replaces_it() -> None:
    world = trained(World(nodes=3, retry=Retry(crashes=1)))
    world.signs = {1: "memory"}
    before = [world.member(node).vm.uid for node in range(3)]
    crashed(world)
    (crash,) = world.events(Event.CRASH)
    assert crash.detail.endswith("; an uncorrectable memory error of a GPU on the machine of node 1")
    assert [world.member(node).vm.uid for node in range(3)] == before
    crashed(world)
    after = [world.member(node).vm.uid for node in range(3)]
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True]
    record = world.record()
    assert (record.budget.crashes, record.budget.preemptions, record.phase) == (1, 0, Phase.RUN)
    assert causes(world, Event.LOSS) == ["host"] and preemptions(world.events()).total == 0
    assert causes(world, Event.GENERATION) == ["start", "crash", "host"]
    shown = job_view(record, None, world.events(), world.stack, world.now())
    assert "node 1: its machine is lost in z-a (host)" in [line.text for line in shown.events]


def test_a_faulty_script_uses_up_the_crash_budget() -> None:
    world = trained(World(nodes=3, retry=Retry(crashes=2)))
    world.signs = {0: "fault"}
    for _ in range(8):
        world.run(30)
        world.crashing = 1
        world.until(lambda: world.crashing == 0 or world.record().phase is Phase.HOLD, 400)
        if world.record().phase is Phase.HOLD:
            break
        world.until(lambda: world.training() or world.record().phase is Phase.HOLD, 400)
    assert world.record().phase is Phase.HOLD
    assert "crash budget of 2" in world.record().reason
    assert causes(world, Event.LOSS) == ["host"] * 2, "two machines were given up on the way"


def test_network_errors_of_all_survivors_blame_no_machine() -> None:
    world = trained(World(nodes=3, retry=Retry(crashes=5)))
    world.signs = dict.fromkeys(range(3), "network")
    crashed(world, 3)
    assert world.record().budget.crashes == 3 and world.events(Event.LOSS) == []
    world.signs = {2: "network"}
    crashed(world, 2)
    assert causes(world, Event.LOSS) == ["host"]


def test_an_invalid_sign_goes_to_quarantine() -> None:
    world = trained(World(nodes=2, retry=Retry(crashes=5)))
    world.signs = {0: "evil"}
    crashed(world, 2)
    assert world.record().budget.crashes == 2 and world.events(Event.LOSS) == []


def test_a_machine_in_repairing_is_lost_at_once() -> None:
    world = trained(World(nodes=2))
    world.run(60)
    broken = world.member(1)
    broken.status, broken.agent = VmStatus.REPAIRING, None
    world.round()
    (loss,) = world.events(Event.LOSS)
    assert (loss.node, loss.cause, loss.detail) == (1, "loss", "REPAIRING: its host has failed")
    cur = world.record().nodes[1].cur
    assert cur is None or cur.uid != broken.vm.uid
    world.until(lambda: world.record().gen == 2 and world.training(), 300)
    assert broken.vm.uid not in world.machines, "deleted, by its unique id"


def test_a_standby_in_repair_is_dropped() -> None:
    world = trained(World(nodes=1))
    world.run(60)
    world.preempt(0, notice_s=200)
    world.until(lambda: (n := world.record().nodes[0].next) is not None and n.uid is not None, 100)
    following = world.record().nodes[0].next
    assert following is not None and following.uid is not None
    world.machines[following.uid].status = VmStatus.REPAIRING
    world.round()
    now = world.record().nodes[0]
    assert following.uid not in {slot.uid for slot in (now.cur, now.next) if slot is not None}
