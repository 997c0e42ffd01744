"""Every rule and step of the protocol, removed or inverted in turn; the search must find what breaks.

A mutant is a small text patch of shipped code. Its old text must occur exactly once, so a mutant cannot
silently stop being one when the code changes. It is loaded in a process of its own, by an import hook; no file
is touched. ``story`` is the world that kills it, ``breaks`` how the verdict begins.

Not counted, because they are equivalent:

* deletion by name instead of by unique id: a stale call could hit a namesake, but names carry the attempt, and
  a namesake of a superseded attempt is superfluous itself;
* no idempotency key's death by itself: the boot deadline gives the attempt up later (both together: a mutant);
* an attach, or a deletion of a disk, without asking whether it is held: the cloud refuses it, the attachment is
  the mutex;
* deletion before superseding by itself: what may be deleted is known from the record that was read;
* a roll call that supersedes in an unanswered zone: the machine was listed when it was admitted (an option).
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import NamedTuple

from tests.model.machine import Story

DECIDE = "spotkeeper.reconcile.decide."


class Patch(NamedTuple):
    """``old`` occurs exactly once in the module's source."""

    module: str
    old: str
    new: str


class Mutant(NamedTuple):
    name: str
    patches: tuple[Patch, ...]
    story: Story
    breaks: str = ""


def _calls(old: str, new: str) -> tuple[Patch, ...]:
    return (Patch(DECIDE + "calls", old, new),)


def _in(room: str, old: str, new: str) -> tuple[Patch, ...]:
    return (Patch(DECIDE + room, old, new),)


def _world(name: str, faults: str = "", wish: str = "", **more: object) -> Story:
    """A story with just the faults (by name, as often as there are names) and the wish that a mutant needs."""
    kinds = faults.split()
    base = {"rounds": 1, "deaths": 0, "split": False, "faults": len(kinds), "wishes": 1 if wish else 0}
    given = {"kinds": frozenset(kinds), "asks": frozenset(wish.split()), **base, **more}
    return Story(name, **given)  # type: ignore[arg-type]


CALM = _world("one rank, all well")
NOTICE = _world("a notice, perhaps withdrawn", "noticed")
KILL = _world("a machine is taken", "killed")
SWAP = _world("a swap", wish="swap")
MOVE = _world("a zone move, perhaps taken back", wish="move")
CANCEL = _world("a job is cancelled", wish="cancel")
STALE_CANCEL = _world("a job is cancelled, two rounds", wish="cancel", rounds=2, zones=("a",))
STATIC = _world("a static node, a job is cancelled", wish="cancel", static=True)
STATIC_TWICE = _world("a static node reboots while another round stalls", "reboots", "cancel", static=True, rounds=2)
TWO_JOBS = _world("two jobs, room for one", jobs=2, cap=1, zones=("a",), rounds=2, deaths=0)
TWO_STATIC = _world("two jobs, one static node", jobs=2, cap=1, zones=("a",), rounds=2, static=True)
TWO_RANKS = _world("two ranks", ranks=2, cap=5, zones=("a",))
TWO_FINISH = _world("two ranks finish", wish="finish", ranks=2, cap=5, zones=("a",))

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
        _calls(
            _SUPERFLUOUS, "    cur = draft.ranks[index].cur\n    return cur is not None and attempt < cur.attempt\n"
        ),
        NOTICE,
        "L",
    ),
    Mutant(
        "collects what is older than the newest: cur goes",
        _calls(
            "        if slot.attempt == attempt:\n            return vm.zone",
            "        if slot.attempt == attempt == draft.ranks[index].top:\n            return vm.zone",
        ),
        NOTICE,
        "S3",
    ),
    Mutant(
        "collects whatever is not cur: the successor goes",
        _calls(
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
        _in(
            "draft",
            "        self.put(index, cur=None, cause=cause, vacant_since=self.now)\n",
            "        top = self.ranks[index].top - 1\n"
            "        self.put(index, cur=None, cause=cause, vacant_since=self.now, top=top)\n",
        ),
        KILL,
        "S5",
    ),
    Mutant(
        "promotion without a new generation",
        _in("draft", "SlotState.INTENT else SlotState.ADMITTED\n", "SlotState.INTENT else SlotState.MEMBER\n"),
        SWAP,
        "S",
    ),
    Mutant(
        "admits by instance id without boot id",
        _in("seen", "fresh = fact.boot != slot.boot and fact.boot not in slot.past", "fresh = slot.boot is None"),
        _world("a reboot", "reboots"),
        "L1",
    ),
    Mutant(
        "admits what is not listed yet",
        _in("seen", _HELLO, _HELLO_UNLISTED),
        _world("EC2 lists late", cloud="ec2"),
        "S",
    ),
    Mutant(
        "detaches early on any old word",
        _calls(
            "if f.kind is Kind.FREED and f.uid == vm.uid]",
            "if f.kind in (Kind.FREED, Kind.RELEASED) and f.uid == vm.uid]",
        ),
        _world("a move taken back, then a roll call unanswered", "SILENT ROLL", "move"),
        "S2",
    ),
    Mutant(
        "the disk moves to next before promotion",
        _calls(
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
        _calls(
            "if source is not None and not source.users and not draft.view.vms_of(index):", "if source is not None:"
        ),
        _world("a zone move, a save that takes too long", "PAST", "move"),
        "S7",
    ),
    Mutant(
        "a cancelled move's disk number is used again",
        _in(
            "moves",
            "    ranks = tuple(replace(rank, copy=None) for rank in draft.ranks)\n",
            "    ranks = tuple(replace(rank, copy=None, disk_top=rank.disk) for rank in draft.ranks)\n",
        ),
        MOVE,
        "S5",
    ),
    Mutant(
        "a roll-call answer of any version counts",
        _in("exits", "fact.value.isdigit() and int(fact.value) >= roll.ver", "fact.value.isdigit()"),
        _world("an answered roll call, then a hang", "SILENT hangs"),
        "L",
    ),
    Mutant(
        "a withdrawn notice keeps next",
        _in(
            "needs",
            "if not needed(rank) and rank.next is not None:",
            "if not needed(rank) and rank.next is not None and draft.now < 0:",
        ),
        NOTICE,
        "L",
    ),
    Mutant(
        "a dropped next does not resume cur",
        _in(
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
        _in(
            "needs",
            "following is None or following.state is not SlotState.ADMITTED or rank.cur is None:",
            "following is None or rank.cur is None:",
        ),
        NOTICE,
        "S",
    ),
    Mutant(
        "the tombstone is dropped at the end",
        _calls(
            "    if draft.record.phase in (Phase.END, Phase.DONE):\n        return True\n    if index",
            "    if draft.record.phase in (Phase.END, Phase.DONE):\n"
            "        return draft.record.phase is Phase.END\n    if index",
        ),
        STALE_CANCEL,
        "L2",
    ),
    Mutant(
        "an unanswered zone is taken as empty",
        _in(
            "seen",
            "        if slot.zone not in self.answered:\n            return False\n        if slot.node",
            "        if slot.node",
        ),
        _world("a zone does not answer", "blind"),
        "S4",
    ),
    Mutant(
        "the intent comes before the grant",
        _in(
            "grants",
            "    for offer in options:\n        if draft.held.room(",
            "    if options:\n        _intent(draft, index, which, attempt, options[0])\n        return\n"
            "    for offer in options:\n        if draft.held.room(",
        ),
        CALM,
        "S10",
    ),
    Mutant("a slot is given back when it is superseded", _in("grants", _OVER, "    return True\n"), KILL, "S8"),
    Mutant(
        "a static node is taken back without its word",
        _in("grants", "        return any(fact.kind is Kind.DROPPED for fact in facts) or", "        return True or"),
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
        _world("a static node is granted again", "BOOT", "cancel", static=True, zones=("a",), cap=0),
        "S8",
    ),
    Mutant(
        "an unwanted grant is released without burning its number",
        (
            Patch(
                DECIDE + "grants", "if grant.attempt > rank.top and grant not in draft.wanted:", "if grant.attempt < 0:"
            ),
            Patch(DECIDE + "grants", "or (grant.attempt > top and not ended):", "or grant in draft.wanted:"),
        ),
        _world("a notice, perhaps withdrawn, two rounds", "noticed", rounds=2, zones=("a",)),
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
        _world("a record is deleted by hand, two sweeps", "gone", rounds=2, zones=("a",), lost_records=True),
        "S5",
    ),
)

# -- the nine rules

RULES = (
    Mutant("rule 1: no compare-and-swap", (), _world("a slow round", rounds=2, zones=("a",), cas=False), "S"),
    Mutant(
        "rule 2: an admission does not say whom",
        _in("slots", "uid=vm.uid, boot=fact.boot, address", "uid=None, boot=None, address"),
        CALM,
        "",
    ),
    Mutant(
        "rule 3: lists before it reads the record",
        (
            Patch(
                "spotkeeper.reconcile.passes",
                "READS = (Read.RECORD, Read.FACTS, Read.ALLOC, Read.LISTING)",
                "READS = (Read.LISTING, Read.RECORD, Read.FACTS, Read.ALLOC)",
            ),
        ),
        _world("a slow round", rounds=2, zones=("a",)),
        "S4",
    ),
    Mutant(
        "rule 4: collects every attempt but its own, also newer ones",
        _calls(_SUPERFLUOUS, "    return attempt != 0\n"),
        _world("a notice, a slow round", "noticed", rounds=2, zones=("a",), split=True),
        "S3",
    ),
    Mutant(
        "rule 5: deletes before it supersedes",
        _calls(
            "            return vm.zone != slot.zone or (",
            "            return slot.notice is not None or vm.zone != slot.zone or (",
        ),
        NOTICE,
        "S3",
    ),
    Mutant(
        "rule 6: any machine of the right name is ours",
        (
            Patch(
                DECIDE + "seen",
                "            if vm.zone == slot.zone and slot.uid in (None, vm.uid):",
                "            if vm.zone == slot.zone:",
            ),
            Patch(
                DECIDE + "calls",
                "vm.zone != slot.zone or (slot.uid is not None and vm.uid != slot.uid)",
                "vm.zone != slot.zone",
            ),
        ),
        _world("a twin of a machine that was taken", "killed forgotten", rounds=2, zones=("a",)),
        "L",
    ),
    Mutant(
        "rule 7: an intent never dies",
        _in("slots", "    elif why := view.stillborn(index, slot):\n", "    elif why := '':\n"),
        KILL,
        "L1",
    ),
    Mutant(
        "rule 8: a retry picks its zone anew",
        _calls(
            "slot.attempt, slot.pool, slot.zone, slot.model)",
            "slot.attempt, slot.pool, max(draft.view.answered), slot.model)",
        ),
        CALM,
        "S10",
    ),
    Mutant(
        "rule 9: takes the disk from a machine that has not let go",
        _calls("        if any(fact.value == str(rank.disk) for fact in freed):\n", "        if True:\n"),
        _world("a roll call that nobody answers", "SILENT ROLL"),
        "S2",
    ),
)

# -- other steps

STEPS = (
    Mutant(
        "done before everything is gone",
        _in("ended", "    if view.vms or disks or view.snapshots or slots:\n        return\n", ""),
        CANCEL,
        "L2",
    ),
    Mutant(
        "done though a zone did not answer",
        _in("ended", "or not view.complete or draft.seen.blind:", "or draft.seen.blind:"),
        _world("a job is cancelled, a zone does not answer", "blind", "cancel"),
        "L2",
    ),
    Mutant(
        "a slot is given back though a zone did not answer",
        _in("grants", _OVER, "    return not draft.view.vms.get((grant.rank, grant.attempt))\n"),
        _world("a machine is taken, a zone does not answer", "killed blind"),
        "S8",
    ),
    Mutant(
        "a machine's end is not seen",
        _in(
            "seen",
            "        if vm is None or vm.status is VmStatus.DEAD:\n            return True\n",
            "        if vm is None:\n            return False\n",
        ),
        KILL,
        "L",
    ),
    Mutant(
        "a disk that nobody holds is left over",
        _calls(
            "    if number in (rank.disk, rank.copy):\n",
            "    if rank.cur is not None:\n        return True\n    if number in (rank.disk, rank.copy):\n",
        ),
        KILL,
        "S7",
    ),
    Mutant(
        "a generation without its disks",
        _in(
            "generation",
            "    if len(attached) == len(ready):\n        return True\n",
            "    if ready:\n        return True\n",
        ),
        CALM,
        "",
    ),
    Mutant(
        "nobody waits for the save",
        _in(
            "draft",
            "        return all(self.view.ended(index, slot, record.gen) for index, slot in self.members())\n",
            "        return True\n",
        ),
        SWAP,
        "S4",
    ),
    Mutant(
        "leaves the zone before the save",
        _in("moves", "is not SlotState.MEMBER or draft.halted())\n", "is not SlotState.MEMBER or draft.record.stop)\n"),
        MOVE,
        "S4",
    ),
    Mutant(
        "arrives though a zone did not answer",
        (
            Patch(
                DECIDE + "moves",
                "    return move is not None and {move.zone, draft.record.zone} <= draft.view.answered\n",
                "    return move is not None\n",
            ),
        ),
        _world("a zone move, a zone does not answer", "blind", "move"),
        "",
    ),
    Mutant(
        "an ask is taken in again and again",
        _in("asks", "        if ask.id in draft.record.asks_done:\n            continue\n", ""),
        SWAP,
        "",
    ),
    Mutant(
        "a stop is never over",
        _in("generation", "        stop=False,\n", ""),
        NOTICE,
        "L",
    ),
    Mutant(
        "a loss is not followed by a new machine",
        _in("slots", "        draft.vacate(index, cause)\n", "        pass\n"),
        KILL,
        "L",
    ),
    Mutant(
        "success by one member's word",
        _in("exits", "and all(codes.get(index) == 0 for", "and any(codes.get(index) == 0 for"),
        TWO_FINISH,
        "S6",
    ),
    Mutant(
        "no cap",
        (
            Patch(
                "spotkeeper.reconcile.alloc",
                "        return self._pools[offer.pool] < pool.max_nodes\n",
                "        return True\n",
            ),
        ),
        TWO_JOBS,
        "S8",
    ),
    Mutant(
        "a static node may be granted twice",
        (
            Patch(
                "spotkeeper.reconcile.alloc",
                "            return not taken\n",
                "            return True\n",
            ),
        ),
        TWO_STATIC,
        "S8",
    ),
    Mutant("grants without compare-and-swap", (), TWO_JOBS._replace(name="two jobs, a slow round", cas=False), "S"),
    Mutant(
        "a generation of those that happen to be there",
        _in(
            "generation", "if not ready or not (len(ready) == draft.size() or _smaller(draft, ready)):", "if not ready:"
        ),
        TWO_RANKS,
        "",
    ),
)

MUTANTS = (*BROKE, *RULES, *STEPS)
# One of every kind, for `make test`.
SLICE = tuple(m for i, m in enumerate(MUTANTS) if m.story in (CALM, KILL, SWAP, CANCEL, MOVE, NOTICE))


# -- loading


class _Loader(SourceFileLoader):
    patches: tuple[Patch, ...] = ()

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_source(fullname) or ""
        for patch in self.patches:
            if source.count(patch.old) != 1:
                raise SystemExit(
                    f"{patch.module}: this text occurs {source.count(patch.old)} times, not once:\n{patch.old}"
                )
            source = source.replace(patch.old, patch.new)
        return compile(source, self.path, "exec")


class Finder(importlib.abc.MetaPathFinder):
    """Gives patched modules their patched source; everything else is found as ever."""

    def __init__(self, patches: tuple[Patch, ...]) -> None:
        self.patches = patches

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        mine = tuple(patch for patch in self.patches if patch.module == name)
        if not mine:
            return None
        sys.meta_path.remove(self)
        try:
            found = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if found is None or found.origin is None:
            raise SystemExit(f"no module {name} to make a mutant of")
        loader = _Loader(name, found.origin)
        loader.patches = mine
        return importlib.util.spec_from_file_location(name, found.origin, loader=loader)


def infect(mutant: Mutant) -> None:
    """Load the mutant in this process, instead of what has been loaded of the project so far."""
    for name in [n for n in sys.modules if n == "spotkeeper" or n.startswith(("spotkeeper.", "tests.model"))]:
        if name != __name__:
            del sys.modules[name]
    sys.meta_path.insert(0, Finder(mutant.patches))


def verdict(number: int, found: dict[str, object]) -> bool:
    """Whether the search broke the mutant, and in the way that its row says."""
    why = str(found["why"]).removeprefix("while all is calm: ")
    return bool(why) and why.startswith(MUTANTS[number].breaks)
