"""The safety properties S1 to S10 of the protocol, looked at wherever the world changes.

The wording is that of the design: a *member* is in the newest generation; a healthy member is superseded only for
a fact (loss, notice, suspicion) or a recorded request (move, swap, resize, pause). A check never decides anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from spotkeeper.contract.allocation import Allocation
from spotkeeper.contract.cloud import InsertVm, VmStatus
from spotkeeper.contract.record import Node, Phase, Record, Slot, SlotState

if TYPE_CHECKING:
    from spotkeeper.contract.facts import Fact
    from spotkeeper.contract.generation import Generation
    from tests.sim.agent import Agent
    from tests.sim.cloud import Drive, Machine
    from tests.sim.world import World


def live(node: Node) -> Iterator[Slot]:
    yield from (slot for slot in (node.cur, node.next) if slot is not None)


class Checks:
    """``S8`` is looked at where grants are written: a machine without a grant is one too many."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.published: dict[tuple[str, int], tuple[tuple[int, int], ...]] = {}

    # -- records

    def record(self, old: Record | None, new: Record) -> None:
        if old is None:
            return
        self._counters(old, new)
        self._generation(old, new)
        if old.phase is Phase.RUN and new.phase is Phase.RUN:
            for index, (before, after) in enumerate(zip(old.nodes, new.nodes, strict=False)):
                self._superseded(old, new, index, before, after)

    def _counters(self, old: Record, new: Record) -> None:
        if new.ver != old.ver + 1 or new.gen < old.gen:
            self.world.violate("S5", f"version {old.ver} -> {new.ver}, generation {old.gen} -> {new.gen}")
        ended = (Phase.END, Phase.DONE)
        if old.phase in ended and new.phase not in ended:
            self.world.violate("S5", f"a job that had ended is {new.phase.value} again")
        if old.phase is Phase.DONE and new.phase is not Phase.DONE:
            self.world.violate("S5", "a tombstone comes to life")
        for index, (before, after) in enumerate(zip(old.nodes, new.nodes, strict=False)):
            if after.top < before.top or after.disk_top < before.disk_top or after.disk > after.disk_top:
                self.world.violate("S5", f"node {index}: counters go back")
            if any(slot.attempt > after.top for slot in live(after)):
                self.world.violate("S5", f"node {index}: an attempt above its counter")

    def _generation(self, old: Record, new: Record) -> None:
        members = tuple((i, s.attempt) for i in new.members if (s := new.nodes[i].cur) is not None)
        if new.gen == old.gen:
            return
        if new.gen != old.gen + 1 or (new.job, new.gen) in self.published:
            self.world.violate("S6", f"generation {old.gen} -> {new.gen}, or published twice")
        self.published[new.job, new.gen] = members
        uids = []
        for index in new.members:
            slot = new.nodes[index].cur
            if slot is None or slot.state is not SlotState.MEMBER or slot.uid is None:
                self.world.violate("S6", f"generation {new.gen}: node {index} is listed and no member")
            else:
                uids.append(slot.uid)
        if len(set(uids)) != len(uids):
            self.world.violate("S1", f"generation {new.gen}: one machine is two members")

    def _superseded(self, old: Record, new: Record, index: int, before: Node, after: Node) -> None:
        """S4: nobody healthy is given up without a reason."""
        cur = before.cur
        if cur is None or cur.state is SlotState.INTENT or cur.uid is None:
            return
        if after.cur is not None and after.cur.attempt == cur.attempt:
            return
        requested = (before.replace_reason or old.move or new.move or old.pause or new.pause) is not None and (
            before.replace_reason or old.move or new.move or old.pause
        )
        if requested or cur.notice is not None or cur.ends is not None or self.world.shrinks(new, index):
            return
        if cur.state is SlotState.ADMITTED and old.zone != new.zone:
            return  # the gang starts in another zone; nothing was trained yet
        if self.healthy(cur):
            self.world.violate("S4", f"node {index} attempt {cur.attempt}: healthy, and superseded ({after.cause})")

    def healthy(self, slot: Slot) -> bool:
        """Its machine runs, without a notice, and the boot that was admitted is alive on it."""
        machine = self.world.cloud.machines.get(slot.uid or "")
        if machine is None or machine.vm.status is not VmStatus.RUNNING or machine.notice is not None:
            return False
        agent = machine.agent
        return agent is not None and agent.boot == slot.boot and not agent.hung and not self.world.unheard(agent)

    # -- grants

    def allocation(self, allocation: Allocation) -> None:
        grants = allocation.grants
        if len({(g.job, g.node, g.attempt) for g in grants}) != len(grants):
            self.world.violate("S8", "an attempt has two grants")
        for pool in self.world.stack.pools:
            held = [g for g in grants if g.resource.removesuffix("/on-demand") == f"slot:{pool.name}"]
            dear = sum(g.resource.endswith("/on-demand") for g in held)
            if len(held) > pool.max_machines or dear > pool.max_on_demand:
                self.world.violate("S8", f"{pool.name}: {len(held)} grants, {dear} on-demand")

    # -- calls

    def insert(self, action: InsertVm) -> None:
        """S10: the intent is durable before the call, with the same zone and model (rule 8)."""
        held = self.world.store.read_record(action.job)
        node = held.value.nodes[action.node] if held and action.node < len(held.value.nodes) else None
        if node is None:
            ended = held is not None and held.value.phase is not Phase.RUN
            if not ended:
                self.world.violate("S10", f"an insert for node {action.node}, which no record knows")
            return
        if action.attempt > node.top:
            self.world.violate("S10", f"an insert of attempt {action.attempt}, the record knows {node.top}")
        for slot in live(node):
            if slot.attempt == action.attempt and (slot.zone, slot.model) != (action.zone, action.model):
                self.world.violate("S10", f"attempt {action.attempt} was intended for {slot.zone}, not {action.zone}")
        mine = (action.job, action.node, action.attempt)
        granted = any((g.job, g.node, g.attempt) == mine for g in self.world.store.read_allocation().value.grants)
        if not granted and any(slot.attempt == action.attempt for slot in live(node)):
            self.world.violate("S8", f"node {action.node} attempt {action.attempt} is inserted without a grant")

    def delete(self, machine: Machine) -> None:
        """S3: superseded first, deleted second."""
        held = self.world.store.read_record(machine.vm.job)
        if held is None or held.value.over or machine.vm.node >= len(held.value.nodes):
            return
        if any(slot.uid == machine.uid for slot in live(held.value.nodes[machine.vm.node])):
            self.world.violate("S3", f"{machine.vm.name} is deleted, and the record counts on it")

    def detach(self, drive: Drive) -> None:
        machine = self.world.cloud.machines.get(drive.user or "")
        if machine is not None and machine.agent is not None and machine.agent.mounted is drive:
            self.world.violate("S2", f"{drive.disk.name} is detached from {machine.vm.name}, which has it mounted")

    def delete_disk(self, drive: Drive) -> None:
        """S7: the job has ended, or a newer disk is in its place; and never the only one with the newest commit."""
        disk = drive.disk
        held = self.world.store.read_record(disk.job)
        if held is None or held.value.over:
            return
        job = self.world.jobs[disk.job]
        others = [d.newest for d in self.world.cloud.drives.values() if d is not drive and d.disk.job == disk.job]
        if drive.newest is not None and drive.newest == job.committed and drive.newest not in others:
            self.world.violate("S7", f"{disk.name} is deleted; commit {drive.newest} was on no other disk")

    # -- agents

    def fact(self, fact: Fact) -> None:
        """S9: what a machine says is filed under its own node and attempt."""
        machine = self.world.cloud.machines.get(fact.uid)
        if machine is not None and (machine.vm.node, machine.vm.attempt) != (fact.node, fact.attempt):
            self.world.violate("S9", f"{machine.vm.name} speaks for node {fact.node} attempt {fact.attempt}")

    def member(self, agent: Agent, doc: Generation) -> None:
        """S1 as the machines live it: one of them trains for a node in a generation."""
        for other in agent.job.agents:
            same = other is not agent and other.alive and other.node == agent.node and other.started == doc.gen
            if same and other.gang is not None:
                self.world.violate("S1", f"{other.name} and {agent.name} train node {agent.node} in {doc.gen}")

    def never_needed(self, machine: Machine) -> int:
        """A duplicate: a machine that ran, which no record ever admitted, beside one that does the same."""
        held = self.world.store.read_record(machine.vm.job)
        if held is None or held.value.phase is not Phase.RUN or machine.vm.node >= len(held.value.nodes):
            return 0
        node = held.value.nodes[machine.vm.node]
        twin = any(
            m.vm.node == machine.vm.node and m.vm.attempt == machine.vm.attempt
            for m in self.world.cloud.of(machine.vm.job)
        )
        return int(twin or (node.cur is not None and node.cur.attempt == machine.vm.attempt))
