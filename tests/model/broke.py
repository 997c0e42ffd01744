"""What broke in the protocol's first search, in its order: each as a mutant of the code that came of it."""

from __future__ import annotations

from tests.model.mutate import (
    CALM,
    DECIDE,
    KILL,
    MOVE,
    NOTICE,
    STALE_CANCEL,
    STATIC,
    SWAP,
    Mutant,
    Patch,
    calls,
    in_,
    world,
)

_SUPERFLUOUS = "    return attempt <= draft.ranks[index].top\n"
_HELLO = """        if vm is None or vm.status is not VmStatus.RUNNING:
            return None
        for fact in self.facts"""
_HELLO_UNLISTED = """        for fact in self.facts.get((rank, slot.attempt), ()):
            if vm is None and fact.kind is Kind.HELLO:
                name = names.vm_name(self.seen.stack.stack, self.job, rank, slot.attempt)
                vm = Vm(name, fact.uid, slot.zone, VmStatus.RUNNING, slot.pool, self.job, rank, slot.attempt, "")
        if vm is None or vm.status is not VmStatus.RUNNING:
            return None
        for fact in self.facts"""
_OVER = "    return draft.view.complete and not draft.view.vms.get((grant.rank, grant.attempt))\n"

# -- "What broke" in the protocol's search, in its order

BROKE = (
    Mutant(
        "collects only attempts older than cur",
        calls(_SUPERFLUOUS, "    cur = draft.ranks[index].cur\n    return cur is not None and attempt < cur.attempt\n"),
        NOTICE,
        "L",
    ),
    Mutant(
        "collects what is older than the newest: cur goes",
        calls(
            "        if slot.attempt == attempt:\n            return vm.zone",
            "        if slot.attempt == attempt == draft.ranks[index].top:\n            return vm.zone",
        ),
        NOTICE,
        "S3",
    ),
    Mutant(
        "collects whatever is not cur: the successor goes",
        calls(
            "    for slot in grants.live_slots(draft.ranks, index):\n"
            "        if slot.attempt == attempt:\n            return",
            "    for slot in grants.live_slots(draft.ranks, index)[:1]:\n"
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
            "        top = self.ranks[index].top - 1\n"
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
        in_("seen", "fresh = fact.boot != slot.boot and fact.boot not in slot.past", "fresh = slot.boot is None"),
        world("a reboot", "reboots"),
        "L1",
    ),
    Mutant(
        "admits what is not listed yet",
        in_("seen", _HELLO, _HELLO_UNLISTED),
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
            "    disk = draft.view.disk(index, rank.disk, cur.zone)\n    record = draft.record\n",
            "    disk = draft.view.disk(index, rank.disk, cur.zone)\n    record = draft.record\n"
            "    if disk is not None and disk.users and admitted(rank.next):\n"
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
            "moves",
            "    ranks = tuple(replace(rank, copy=None) for rank in draft.ranks)\n",
            "    ranks = tuple(replace(rank, copy=None, disk_top=rank.disk) for rank in draft.ranks)\n",
        ),
        MOVE,
        "S5",
    ),
    Mutant(
        "a roll-call answer of any version counts",
        in_("exits", "fact.value.isdigit() and int(fact.value) >= roll.ver", "fact.value.isdigit()"),
        world("an answered roll call, then a hang", "SILENT hangs"),
        "L",
    ),
    Mutant(
        "a withdrawn notice keeps next",
        in_(
            "needs",
            "if rank.next is not None and not needed(rank) and not rank.looks",
            "if rank.next is not None and not needed(rank) and draft.now < 0 and not rank.looks",
        ),
        NOTICE,
        "L",
    ),
    Mutant(
        "a dropped next does not resume cur",
        in_(
            "generation",
            "    if not draft.halted():\n        return\n",
            "    same = all(r.cur is not None and r.cur.state is SlotState.MEMBER for r in draft.ranks)\n"
            "    if not draft.halted() or (draft.record.gen and same):\n        return\n",
        ),
        NOTICE,
        "L1",
    ),
    Mutant(
        "promotes an intent while cur trains",
        in_(
            "needs",
            "following is None or following.state is not SlotState.ADMITTED or rank.cur is None:",
            "following is None or rank.cur is None:",
        ),
        NOTICE,
        "S",
    ),
    Mutant(
        "the tombstone is dropped at the end",
        calls(
            "    if draft.record.phase in (Phase.END, Phase.DONE):\n        return True\n    if index",
            "    if draft.record.phase in (Phase.END, Phase.DONE):\n"
            "        return draft.record.phase is Phase.END\n    if index",
        ),
        STALE_CANCEL,
        "L2",
    ),
    Mutant(
        "an unanswered zone is taken as empty",
        in_(
            "seen",
            "        if slot.zone not in self.answered:\n            return False\n        if slot.node",
            "        if slot.node",
        ),
        world("a zone does not answer", "blind"),
        "S4",
    ),
    Mutant(
        "the intent comes before the grant",
        in_(
            "grants",
            "    for offer in options:\n        if draft.held.room(",
            "    if options:\n        why = cause or _cause(draft.ranks[index], which, options[0])\n"
            "        _intent(draft, index, which, attempt, options[0], why)\n        return\n"
            "    for offer in options:\n        if draft.held.room(",
        ),
        CALM,
        "S10",
    ),
    Mutant("a slot is given back when it is superseded", in_("grants", _OVER, "    return True\n"), KILL, "S8"),
    Mutant(
        "a static node is taken back without its word",
        in_("grants", "        return any(fact.kind is Kind.DROPPED for fact in facts) or", "        return True or"),
        STATIC,
        "S8",
    ),
    Mutant(
        "a static node's word counts for any attempt",
        (
            Patch(
                DECIDE + "grants",
                "    facts = draft.view.facts.get((grant.rank, grant.attempt), ())\n    node",
                "    facts = [fact for said in draft.view.facts.values() for fact in said]\n    node",
            ),
            # by itself it is covered by the tidying: words of attempts that are over are forgotten
            Patch(DECIDE + "calls", "    if draft.seen.blind:  # a", "    if not draft.seen.blind:  # a"),
        ),
        world("a static node is granted again", "BOOT", "cancel", static=True, zones=("a",), cap=0),
        "S8",
    ),
    Mutant(
        "an unwanted grant is released without burning its number",
        (
            Patch(
                DECIDE + "grants", "if grant.attempt > rank.top and grant not in draft.wanted:", "if grant.attempt < 0:"
            ),
            Patch(
                DECIDE + "grants",
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
                "spotkeeper.reconcile.sweep",
                "        if _read(store, job, failed) is not None or job in failed:\n"
                "            continue\n        record = _end",
                "        record = _end",
            ),
            Patch(
                "spotkeeper.reconcile.sweep",
                "store.create_record(record):",
                "store.cas_record(record, '') is not None:",
            ),
        ),
        world("a record is deleted by hand, two sweeps", "gone", rounds=2, zones=("a",), lost_records=True),
        "S5",
    ),
)
