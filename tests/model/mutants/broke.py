"""What broke in the protocol's first search, in its order: each as a mutant of the code that came of it."""

from __future__ import annotations

from tests.model.mutate import (
    CALM,
    DECIDE,
    KILL,
    MOVE,
    NOTICE,
    OVER,
    STALE_CANCEL,
    STATIC,
    SUPERFLUOUS,
    SWAP,
    Mutant,
    Patch,
    calls,
    in_,
    world,
)

_HELLO = """        if vm is None or vm.status is not VmStatus.RUNNING:
            return None
        for fact in self.facts"""
_HELLO_UNLISTED = """        for fact in self.facts.get((node, slot.attempt), ()):
            if vm is None and fact.kind is Kind.HELLO:
                name = names.vm_name(self.snapshot.stack.stack, self.job, node, slot.attempt)
                vm = Vm(name, fact.uid, slot.zone, VmStatus.RUNNING, slot.pool, self.job, node, slot.attempt, "")
        if vm is None or vm.status is not VmStatus.RUNNING:
            return None
        for fact in self.facts"""

# -- "What broke" in the protocol's search, in its order

BROKE = (
    Mutant(
        "collects only attempts older than cur",
        calls(SUPERFLUOUS, "    cur = draft.nodes[index].cur\n    return cur is not None and attempt < cur.attempt\n"),
        NOTICE,
        "L",
    ),
    Mutant(
        "collects what is older than the newest: cur goes",
        calls(
            "        if slot.attempt == attempt:\n            return vm.zone",
            "        if slot.attempt == attempt == draft.nodes[index].top:\n            return vm.zone",
        ),
        NOTICE,
        "S3",
    ),
    Mutant(
        "collects whatever is not cur: the successor goes",
        calls(
            "    for slot in reservations.live_slots(draft.nodes, index):\n"
            "        if slot.attempt == attempt:\n            return",
            "    for slot in reservations.live_slots(draft.nodes, index)[:1]:\n"
            "        if slot.attempt == attempt:\n            return",
        ),
        NOTICE,
        "S3",
    ),
    Mutant(
        "no attempt counter",
        in_(
            "draft",
            "        self.put(index, cur=None, cause=cause, vacant_since=self.now)\n",
            "        top = self.nodes[index].top - 1\n"
            "        self.put(index, cur=None, cause=cause, vacant_since=self.now, top=top)\n",
        ),
        KILL,
        "L6",
    ),
    Mutant(
        "promotion without a new generation",
        in_("draft", "SlotState.INTENT else SlotState.ADMITTED\n", "SlotState.INTENT else SlotState.MEMBER\n"),
        SWAP,
        "S",
    ),
    Mutant(
        "admits by instance id without boot id",
        in_("snapshot", "fresh = fact.boot != slot.boot and fact.boot not in slot.past", "fresh = slot.boot is None"),
        world("a reboot", "reboots"),
        "L1",
    ),
    Mutant(
        "admits what is not listed yet",
        in_("snapshot", _HELLO, _HELLO_UNLISTED),
        world("EC2 lists late", cloud="ec2"),
        "S",
    ),
    Mutant(
        "detaches early on any old word",
        calls(
            "if f.kind is Kind.FREED and f.uid == vm.uid]",
            "if f.kind in (Kind.FREED, Kind.RELEASED) and f.uid == vm.uid]",
        ),
        world("a move taken back, then a roll call unanswered", "SILENT ROLL", "move"),
        "S2",
    ),
    Mutant(
        "the disk moves to next before promotion",
        calls(
            "    disk = draft.queries.disk(index, node.disk, cur.zone)\n    record = draft.record\n",
            "    disk = draft.queries.disk(index, node.disk, cur.zone)\n    record = draft.record\n"
            "    if disk is not None and disk.users and admitted(node.next):\n"
            "        yield DetachDisk(disk.name, vm.name, vm.uid, cur.zone)\n",
        ),
        SWAP,
        "S2",
    ),
    Mutant(
        "copies a disk while it is attached",
        calls("if source is not None and not source.users and not here:", "if source is not None:"),
        world("a zone move, a save that takes too long", "PAST", "move"),
        "S7",
    ),
    Mutant(
        "a cancelled move's disk number is used again",
        in_(
            "gang.zone_move",
            "    nodes = tuple(replace(node, copy=None) for node in draft.nodes)\n",
            "    nodes = tuple(replace(node, copy=None, disk_top=node.disk) for node in draft.nodes)\n",
        ),
        MOVE,
        "S5",
    ),
    Mutant(
        "a roll-call answer of any version counts",
        in_("gang.exits", "fact.value.isdecimal() and int(fact.value) >= roll.ver", "fact.value.isdecimal()"),
        world("an answered roll call, then a hang", "SILENT hangs"),
        "L",
    ),
    Mutant(
        "a withdrawn notice keeps next",
        in_(
            "provisioning.replacement",
            "    return needed(node) or node.probing or",
            "    return needed(node) or draft.now >= 0 or",
        ),
        NOTICE,
        "L",
    ),
    Mutant(
        "a dropped next does not resume cur",
        in_(
            "gang.generation",
            "    if not draft.halted():\n        return\n",
            "    same = all(r.cur is not None and r.cur.state is SlotState.MEMBER for r in draft.nodes)\n"
            "    if not draft.halted() or (draft.record.gen and same):\n        return\n",
        ),
        NOTICE,
        "L1",
    ),
    Mutant(
        "promotes an intent while cur trains",
        in_(
            "provisioning.replacement",
            "following is None or following.state is not SlotState.ADMITTED or node.cur is None:",
            "following is None or node.cur is None:",
        ),
        NOTICE,
        "S",
    ),
    Mutant(
        "the tombstone is dropped at the end",
        calls(
            "    if draft.record.over:\n        return True\n    if index",
            "    if draft.record.over:\n        return draft.record.phase is Phase.END\n    if index",
        ),
        STALE_CANCEL,
        "L2",
    ),
    Mutant(
        "an unanswered zone is taken as empty",
        in_(
            "snapshot",
            "        if slot.zone not in self.answered:\n            return False\n        if slot.machine",
            "        if slot.machine",
        ),
        world("a zone does not answer", "blind"),
        "S4",
    ),
    Mutant(
        "the intent comes before the grant",
        in_(
            "provisioning.reservations",
            "    for offer in options:\n        if draft.tally.fits(",
            "    if options:\n        why = cause or _cause(draft.nodes[index], which, options[0])\n"
            "        _intent(draft, index, which, attempt, options[0], why)\n        return\n"
            "    for offer in options:\n        if draft.tally.fits(",
        ),
        CALM,
        "S10",
    ),
    Mutant(
        "a slot is given back when it is superseded",
        in_("provisioning.reservations", OVER, "    return True\n"),
        KILL,
        "S8",
    ),
    Mutant(
        "a static machine is taken back without its word",
        in_(
            "provisioning.reservations",
            "        return any(fact.kind is Kind.DROPPED for fact in facts) or",
            "        return True or",
        ),
        STATIC,
        "S8",
    ),
    Mutant(
        "a static machine's word counts for any attempt",
        (
            Patch(
                DECIDE + "provisioning.reservations",
                "    facts = draft.queries.facts.get((grant.node, grant.attempt), ())\n    if grant.machine",
                "    facts = [fact for said in draft.queries.facts.values() for fact in said]\n    if grant.machine",
            ),
            # by itself it is covered by the tidying: words of attempts that are over are forgotten
            Patch(DECIDE + "calls", "    if draft.snapshot.blind:  # only", "    if not draft.snapshot.blind:  # only"),
        ),
        world("a static machine is granted again", "BOOT", "cancel", static=True, zones=("a",), cap=0),
        "S8",
    ),
    Mutant(
        "an unwanted grant is released without burning its number",
        (
            Patch(
                DECIDE + "provisioning.reservations",
                "if grant.attempt > node.top and grant not in draft.wanted:",
                "if grant.attempt < 0:",
            ),
            Patch(
                DECIDE + "provisioning.reservations",
                "or (grant.attempt > _written_top(draft, grant) and not ended):",
                "or grant in draft.wanted:",
            ),
        ),
        world("a notice, perhaps withdrawn, two rounds", "noticed", rounds=2, zones=("a",)),
        "S10",
    ),
    Mutant(
        "a record that is missing: ends the job without asking again",
        (
            Patch(
                "spotkeeper.reconcile.controller.tick",
                "        if _read(store, job, failed) is not None or job in failed:\n"
                "            continue\n        record = _end",
                "        record = _end",
            ),
            Patch(
                "spotkeeper.reconcile.controller.tick",
                "store.create_record(record):",
                "store.cas_record(record, '') is not None:",
            ),
        ),
        world("a record is deleted by hand, two sweeps", "gone", rounds=2, zones=("a",), lost_records=True),
        "S5",
    ),
)
