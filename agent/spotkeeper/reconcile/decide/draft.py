"""A record being changed within one pass, and the few changes that several rooms make alike.

Local mutation only: a draft is made from a record and a snapshot, and ends as a plain
:class:`Decision`. Every change of a slot goes through here, so that counters only rise in one place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from msgspec.structs import replace

from spotkeeper.reconcile import alloc
from spotkeeper.reconcile.decide.seen import Seen, View
from spotkeeper.reconcile.select import Runs, Selection, time_of_day
from spotkeeper.spec.cloud import Action
from spotkeeper.spec.facts import Fact
from spotkeeper.spec.job import HOLD_DAYS
from spotkeeper.spec.ledger import Entry, Event
from spotkeeper.spec.model import Model
from spotkeeper.spec.record import Alloc, Grant, Hold, Outcome, Phase, Rank, Record, Slot, SlotState

DAY_S = 86_400.0
OffersKey = tuple[str | None, tuple[Model, ...], tuple[str, ...], bool, bool, Runs | None, frozenset[str], float]
KEPT_LOSSES = 32  # loss times kept in the record, for select()


@dataclass(frozen=True)
class Decision:
    """What one pass asks for: at most one of a new allocation, a new record, or calls.

    ``noted`` entries are true whatever becomes of the write and are written before it;
    those of a record change travel in its ``outbox``. ``stale`` facts may be dropped.
    ``due``: when time alone would change the decision, virtual unix seconds.
    """

    record: Record | None = None
    grants: Alloc | None = None
    actions: tuple[Action, ...] = ()
    noted: tuple[Entry, ...] = ()
    stale: tuple[Fact, ...] = ()
    due: float | None = None

    @property
    def quiet(self) -> bool:
        return self.record is None and self.grants is None and not self.actions


class Draft:
    """The record of one pass, as it would be written; ``wanted``: grants that must be had before that.

    The ranks are kept apart from the record's other fields, in ``ranks``: a change of one costs one, also in
    a gang of 10,000. ``record`` has everything else (its own ``ranks`` are empty); ``whole()`` joins them.
    """

    def __init__(self, record: Record, seen: Seen) -> None:
        self.before = record
        self.record = self._head = replace(record, ranks=())
        self.ranks: list[Rank] = list(record.ranks)
        self.on_demand = sum(map(_on_demand, self.ranks))  # slots of that model, and grants wanted for more
        self.seen = seen
        self.view = View(record, seen)
        self.times = seen.times
        self.now = seen.now
        self.entries: list[Entry] = []
        self.wanted: list[Grant] = []
        self.held = alloc.Tally(seen.alloc.grants)  # and what this pass wants
        self._members: tuple[tuple[int, Slot], ...] | None = None
        self.offers: dict[OffersKey, Selection] = {}  # what select() said in this pass
        self.whys: dict[str, str] = {}  # and why, by offer

    @cached_property
    def types(self) -> dict[str, str]:
        """The machine type of each pool, by its name. A static node's is its own affair."""
        return {pool.name: pool.machine_type for pool in self.seen.stack.pools if pool.kind != "static"}

    @cached_property
    def kinds(self) -> Counter[str]:
        """Machine types of what the gang has, when first asked for; none where the stack has but one."""
        types = self.types
        if len(set(types.values())) < 2:
            return Counter()
        return Counter(types[rank.cur.pool] for rank in self.ranks if rank.cur is not None and rank.cur.pool in types)

    # -- writing

    def set(self, **changes: Any) -> None:
        ranks = changes.pop("ranks", None)
        if ranks is not None:
            self.ranks[:] = ranks
            self.on_demand = sum(map(_on_demand, self.ranks)) + sum(map(alloc.is_on_demand, self.wanted))
        self.record = replace(self.record, **changes)
        self._members = None

    @property
    def changed(self) -> bool:
        return self.record != self._head or self.ranks != list(self.before.ranks)

    def whole(self) -> Record:
        """The record with its ranks, as it would be written."""
        return replace(self.record, ranks=tuple(self.ranks))

    def put(self, index: int, **changes: Any) -> None:
        old = self.ranks[index]
        self.ranks[index] = new = replace(old, **changes)
        self.on_demand += _on_demand(new) - _on_demand(old)
        self._members = None

    def want(self, grant: Grant) -> None:
        self.wanted.append(grant)
        self.held.add(grant)
        self.on_demand += alloc.is_on_demand(grant)

    def forgo(self, grants: Sequence[Grant]) -> None:
        """These are wanted no more."""
        self.wanted = [grant for grant in self.wanted if grant not in grants]
        self.held = alloc.Tally((*self.seen.alloc.grants, *self.wanted))
        self.on_demand = sum(map(_on_demand, self.ranks)) + sum(map(alloc.is_on_demand, self.wanted))

    def install(self, index: int, which: str, slot: Slot) -> None:
        """Set ``cur`` or ``next`` of a rank."""
        if which == "cur":
            self.put(index, cur=slot)
        else:
            self.put(index, next=slot)

    def put_slot(self, index: int, which: str, **changes: Any) -> None:
        slot = getattr(self.ranks[index], which)
        self.install(index, which, replace(slot, **changes))

    def log(self, event: Event, key: str, *, rank: int | None = None, slot: Slot | None = None, **more: Any) -> None:
        """A ledger entry of this change. ``key`` makes its id, the same however often the pass is repeated."""
        self.entries.append(
            Entry(
                at=self.now,
                id=f"{event.value}.{key}",
                event=event,
                gen=self.record.gen,
                rank=rank,
                attempt=slot.attempt if slot else None,
                pool=slot.pool if slot else None,
                zone=slot.zone if slot else None,
                model=slot.model if slot else None,
                **more,
            )
        )

    # -- reading

    def filled(self) -> tuple[int, ...]:
        """The ranks that are to have a machine; the others are parked."""
        return self.record.filled(len(self.ranks))

    def parked(self, index: int) -> bool:
        record = self.record
        if record.parked or record.size is None:
            return index in record.parked
        return index >= record.size

    def size(self) -> int:
        """How many ranks are to have a machine."""
        return len(self.filled())

    def members(self) -> tuple[tuple[int, Slot], ...]:
        """Ranks of the newest generation whose machine still is the one that was in it."""
        if self._members is None:  # asked for by every room, and in most passes nothing changes between them
            slots = ((index, self.ranks[index].cur) for index in self.record.members if index < len(self.ranks))
            self._members = tuple((n, slot) for n, slot in slots if slot and slot.state is SlotState.MEMBER)
        return self._members

    def save_s(self) -> float:
        """From the word to the end of a save. A script that saves by itself is believed: nothing of it is measured."""
        spec = self.seen.spec
        if spec is not None and spec.stop == "signal":
            return max(self.times.save_s, spec.grace_s)
        return self.times.save_s if self.seen.save_s is None else self.seen.save_s

    # -- changes that several rooms make

    def halt(self, deadline: float, cause: str) -> None:
        """Members save and stop by then. An earlier deadline wins; a stop stays set while any rank waits."""
        record = self.record
        if record.gen == 0:
            return
        if record.stop:
            if record.stop_deadline is None or deadline < record.stop_deadline:
                self.set(stop_deadline=deadline)
            return
        self.set(stop=True, stop_since=self.now, stop_deadline=deadline, roll=None)
        self.log(Event.STOP, f"g{record.gen}", cause=cause)

    def halted(self) -> bool:
        """Every member has stopped after its save, or had its time."""
        record = self.record
        if record.gen == 0 or record.stop_deadline is None or self.now >= record.stop_deadline:
            return True
        return all(self.view.ended(index, slot, record.gen) for index, slot in self.members())

    def vacate(self, index: int, cause: str) -> None:
        """Supersede cur (rule 5: the deletion comes later, from the record)."""
        self.put(index, cur=None, cause=cause, vacant_since=self.now)

    def promote(self, index: int, cause: str) -> None:
        """One CAS: next becomes cur in the state it is in; the need is met."""
        following = self.ranks[index].next
        assert following is not None
        state = SlotState.INTENT if following.state is SlotState.INTENT else SlotState.ADMITTED
        since = following.since if state is SlotState.INTENT else self.now
        slot = replace(following, state=state, since=since, cause=cause)
        self.put(index, cur=slot, next=None, wish=None, refused=())
        self.log(Event.PROMOTED, f"r{index}.a{slot.attempt}", rank=index, slot=slot, cause=cause)

    def end(self, outcome: Outcome, reason: str, rank: int | None = None) -> None:
        """The outcome is known: everything is superseded in the same write. ``rank``: whose doing it was."""
        ranks = tuple(replace(rank, cur=None, next=None, wish=None, copy=None) for rank in self.ranks)
        self.set(
            phase=Phase.END,
            outcome=outcome,
            reason=reason,
            ranks=ranks,
            stop=False,
            roll=None,
            move=None,
            pause="",
            hold=None,
            hold_until=None,
            hold_ends=None,
        )
        self.log(Event.END, "job", rank=rank, cause=outcome.value, detail=reason)

    def fail(self, reason: str, rank: int | None = None) -> None:
        """The job's own code failed: its machines go at once, its disks wait for ``hold_days``. ``rank``: whose."""
        spec = self.seen.spec
        days = spec.hold_days if spec is not None else HOLD_DAYS
        if days:
            self.hold(Hold.FAILURE, reason, ends=self.now + days * DAY_S, rank=rank)
        else:
            self.end(Outcome.FAILED, reason, rank)

    def hold(
        self,
        why: Hold,
        reason: str,
        *,
        until: float | None = None,
        ends: float | None = None,
        rank: int | None = None,
    ) -> None:
        """Machines are given up, disks are kept. ``until``: it tries again; ``ends``: the job ends."""
        ranks = tuple(
            replace(each, cur=None, next=None, wish=None, refused=(), vacant_since=self.now) for each in self.ranks
        )
        self.set(
            phase=Phase.HOLD,
            reason=reason,
            ranks=ranks,
            roll=None,
            pause="",
            dry_since=None,
            short_since=None,
            hold=why,
            hold_until=until,
            hold_ends=ends,
            holds=self.record.holds + 1,
        )
        if self.record.gen:
            self.set(stop=True, stop_deadline=self.now)
        self.log(Event.HOLD, f"v{self.record.ver + 1}", rank=rank, cause=why.value, detail=reason)

    def release(self, cause: str, detail: str = "") -> None:
        """HOLD -> RUN. ``cause``: what the next attempts and their generation are for."""
        budget = self.record.budget
        if self.record.hold is Hold.FAILURE:
            budget = replace(budget, crashes=0, crashed_gen=-1)
        ranks = tuple(replace(rank, cause=cause) for rank in self.ranks)
        self.set(phase=Phase.RUN, reason="", ranks=ranks, budget=budget, hold=None, hold_until=None, hold_ends=None)
        if self.record.gen:
            self.set(stop_since=self.now)  # what waits for machines and disks begins to wait now
        self.log(Event.RESUME, f"v{self.record.ver + 1}", cause=cause, detail=detail)

    def count_loss(self, index: int, slot: Slot) -> None:
        """Preemptions never consume the crash budget; they tell select() how rough the market is."""
        budget = self.record.budget
        if slot.model is not Model.SPOT:
            return
        short = budget.short_lives + 1 if self.now - slot.since < self.times.short_life_s else 0
        times = (*budget.loss_times, self.now)[-KEPT_LOSSES:]
        changed = replace(budget, preemptions=budget.preemptions + 1, loss_times=times, short_lives=short)
        self.set(budget=changed)
        recent = sum(1 for at in times if self.now - at <= self.times.window_s)
        if recent >= self.times.losses + len(self.ranks) or short >= self.times.short_lives:
            since = [at for at in times if self.now - at <= self.times.window_s]
            told = f"{len(since)} losses in {(self.now - since[0]) / 60:.0f} min in {slot.zone}"
            self.bout("too many losses" if short < self.times.short_lives else "lives too short", told)

    def bout(self, cause: str, told: str = "") -> None:
        """On-demand for a while: a bout, not a verdict. ``told``: what brought it about, for people."""
        if self.record.bout_until > self.now:
            return
        self.set(bout_until=self.now + self.times.bout_s)
        again = f"spot again at {time_of_day(self.now + self.times.bout_s)}"
        self.log(Event.BOUT, f"v{self.record.ver + 1}", cause=cause, detail=f"{told}, {again}" if told else again)


def _on_demand(rank: Rank) -> int:
    return sum(slot is not None and slot.model is Model.ON_DEMAND for slot in (rank.cur, rank.next))
