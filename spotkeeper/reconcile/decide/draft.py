"""The draft of the new record in one pass, with the changes that several steps make.

A draft is made from a record and a snapshot. The steps change it, and it becomes a :class:`Decision`. Every change of a
slot goes through the draft's methods, which keep its counts and caches right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from msgspec.structs import replace

from spotkeeper.contract.allocation import Allocation, Claim, Grant, Tally
from spotkeeper.contract.cloud import Action
from spotkeeper.contract.facts import Fact
from spotkeeper.contract.job import HOLD_DAYS
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.record import NO_SPOT_YET, Hold, Node, Outcome, Phase, Record, Slot, SlotState
from spotkeeper.contract.stack import Model, TeamState
from spotkeeper.contract.sweep import SweepState
from spotkeeper.reconcile.decide.queue.room import reserved_elsewhere, usd_elsewhere
from spotkeeper.reconcile.decide.snapshot import Queries, Snapshot
from spotkeeper.reconcile.select.offers import Runs, Selection, time_of_day

HOUR_S, DAY_S = 3600.0, 86_400.0
NO_HOLD: dict[str, Any] = {"hold": None, "hold_until": None, "hold_ends": None, "hold_late": None}
OffersKey = tuple[str | None, tuple[Model, ...], tuple[str, ...], bool, bool, Runs | None, frozenset[str], float, str]
KEPT_LOSSES = 32  # number of loss times that the record keeps for select()


@dataclass(frozen=True)
class Decision:
    """The result of one pass: at most one of a new allocation, a new record, or calls and then a report to a search.

    ``noted``: ledger entries on released grants. They are written before the allocation, since the machines are gone
    even if writing the allocation fails. A new record has its ledger entries in its ``outbox``. ``stale``: facts that
    may be deleted. ``due``: when the next round is due without new reports, virtual unix seconds.
    """

    record: Record | None = None
    grants: Allocation | None = None
    sweep: SweepState | None = None  # with this trial's report
    actions: tuple[Action, ...] = ()
    noted: tuple[Entry, ...] = ()
    stale: tuple[Fact, ...] = ()
    due: float | None = None

    @property
    def quiet(self) -> bool:
        return self.record is None and self.grants is None and self.sweep is None and not self.actions


class Draft:
    """The record that a pass would write, and in ``wanted`` the grants that must exist before it is written.

    ``nodes`` are separate from the record's other fields, so that changing one node costs the same in a gang of
    10,000. ``record`` has all other fields (its ``nodes`` are empty); ``whole()`` joins them.
    """

    def __init__(self, record: Record, snapshot: Snapshot) -> None:
        self.before = record
        self._head = replace(record, nodes=())
        self.record = self._head if record.owner else replace(self._head, owner=snapshot.user)
        self.nodes: list[Node] = list(record.nodes)
        self.on_demand = sum(map(_on_demand, self.nodes))  # on-demand slots plus wanted grants
        self.snapshot = snapshot
        self.queries = Queries(record, snapshot)
        self.times = snapshot.times
        self.now = snapshot.now
        self.entries: list[Entry] = []
        self.wanted: list[Grant] = []
        self.tally = self._tally()  # existing grants plus those that this pass wants
        self.planned: tuple[Claim | None, Allocation] | None = None  # of ``queue.claim``
        self.lacking: int | None = None  # nodes without a machine and a grant, when the pass requests the first machine
        self.sold_out = False  # whether the market has no machine for a node that requested one in this pass
        self.unreserved: str | None = None  # the result of ``queue.claim.bars``
        self._members: tuple[tuple[int, Slot], ...] | None = None
        self.offers: dict[OffersKey, Selection] = {}  # select()'s results in this pass
        self.whys: dict[str, str] = {}  # select()'s reasons, by offer

    @cached_property
    def types(self) -> dict[str, str]:
        """Return the machine type of each pool that is not static, by the pool's name."""
        return {pool.name: pool.machine_type for pool in self.snapshot.stack.pools if pool.kind != "static"}

    def pool(self, index: int) -> str:
        """Return the only pool from which a node may have its machine; "": any pool of the job."""
        return self.snapshot.spec.pool_of(index) if self.snapshot.spec is not None else ""

    @cached_property
    def kinds(self) -> Counter[str]:
        """Return how many nodes have a ``cur`` of each machine type; empty if the stack has only one type.

        Counted at the first call in a pass: later changes of the draft do not change the result.
        """
        types = self.types
        if len(set(types.values())) < 2:
            return Counter()
        return Counter(types[node.cur.pool] for node in self.nodes if node.cur is not None and node.cur.pool in types)

    # -- writing

    def set(self, **changes: Any) -> None:
        nodes = changes.pop("nodes", None)
        if nodes is not None:
            self.nodes[:] = nodes
            self.on_demand = sum(map(_on_demand, self.nodes)) + sum(grant.on_demand for grant in self.wanted)
        self.record = replace(self.record, **changes)
        self._members = None

    @property
    def changed(self) -> bool:
        return self.record != self._head or self.nodes != list(self.before.nodes)

    def whole(self) -> Record:
        """Return the record with its nodes, as it would be written."""
        return replace(self.record, nodes=tuple(self.nodes))

    def put(self, index: int, **changes: Any) -> None:
        old = self.nodes[index]
        self.nodes[index] = new = replace(old, **changes)
        self.on_demand += _on_demand(new) - _on_demand(old)
        self._members = None

    def want(self, grant: Grant) -> None:
        self.wanted.append(grant)
        self.tally.add(grant)
        self.on_demand += grant.on_demand

    def forgo(self, grants: Sequence[Grant]) -> None:
        """Withdraw requests for these grants."""
        self.wanted = [grant for grant in self.wanted if grant not in grants]
        self.tally = self._tally()
        self.on_demand = sum(map(_on_demand, self.nodes)) + sum(grant.on_demand for grant in self.wanted)

    def _tally(self) -> Tally:
        """Count the grants, those that this pass wants, and the machines that are reserved for other jobs."""
        allocation, stack = self.snapshot.allocation, self.snapshot.stack
        team, job, now = self.team, self.before.job, self.snapshot.now
        reserved = reserved_elsewhere(allocation, stack, job, now) if len(allocation.claims) > 1 else {}
        jobs = {job, *(claim.job for claim in allocation.claims if team is not None and claim.team == team.name)}
        limited = team is not None and team.max_usd_hour is not None
        usd = usd_elsewhere(allocation, stack, job, team.name, now) if team is not None and limited else 0.0
        return Tally((*allocation.grants, *self.wanted), reserved, team, jobs, usd)

    @cached_property
    def team(self) -> TeamState | None:
        """Return the team of the job, if the stack has teams."""
        spec, stack = self.snapshot.spec, self.snapshot.stack
        return stack.team_of(self.record.owner, spec.team) if spec is not None and stack.teams else None

    def install(self, index: int, which: str, slot: Slot) -> None:
        """Set ``cur`` or ``next`` of a node."""
        if which == "cur":
            self.put(index, cur=slot)
        else:
            self.put(index, next=slot)

    def new_disk(self, index: int) -> None:
        """Give a node a new disk number, and forget the checkpoints on its old disk."""
        number = self.nodes[index].disk_top + 1
        self.put(index, disk=number, disk_top=number, machine=None, wrote=0, newest_generation=0)

    def put_slot(self, index: int, which: str, **changes: Any) -> None:
        slot = getattr(self.nodes[index], which)
        self.install(index, which, replace(slot, **changes))

    def log(self, event: Event, key: str, *, node: int | None = None, slot: Slot | None = None, **more: Any) -> None:
        """Add a ledger entry. A repeated pass gives it the same ``key``, and so the same id."""
        self.entries.append(
            Entry(
                at=self.now,
                id=f"{event.value}.{key}",
                event=event,
                gen=self.record.gen,
                node=node,
                attempt=slot.attempt if slot else None,
                pool=slot.pool if slot else None,
                zone=slot.zone if slot else None,
                model=slot.model if slot else None,
                **more,
            )
        )

    # -- reading

    def filled(self) -> tuple[int, ...]:
        """Return the nodes that should have a machine; the others are parked."""
        return self.record.filled(len(self.nodes))

    def parked(self, index: int) -> bool:
        record = self.record
        if record.parked or record.size is None:
            return index in record.parked
        return index >= record.size

    def size(self) -> int:
        """Return how many nodes should have a machine."""
        return len(self.filled())

    def members(self) -> tuple[tuple[int, Slot], ...]:
        """Return the members of the newest generation that still have the machine with which it began."""
        if self._members is None:  # cached: every step reads it, few passes change it
            slots = ((index, self.nodes[index].cur) for index in self.record.members if index < len(self.nodes))
            self._members = tuple((n, slot) for n, slot in slots if slot and slot.state is SlotState.MEMBER)
        return self._members

    def save_s(self) -> float:
        """Return a save's duration, virtual seconds: as measured, or ``grace_s`` if the script saves by itself."""
        spec = self.snapshot.spec
        if spec is not None and spec.stop == "signal":
            return max(self.times.save_s, spec.grace_s)
        return self.times.save_s if self.snapshot.save_s is None else self.snapshot.save_s

    # -- changes that several steps make

    def halt(self, deadline: float, cause: str) -> None:
        """Tell members to save and stop by this deadline, or by an earlier one that is already set."""
        record = self.record
        if record.gen == 0:
            return
        if record.stop:
            if record.stop_deadline is None or deadline < record.stop_deadline:
                self.set(stop_deadline=deadline)
            return
        self.set(stop=True, stop_since=self.now, stop_deadline=deadline, roll=None)
        self.log(Event.STOP, f"g{record.gen}", cause=cause)

    def recall(self, why: str) -> None:
        """Have the job go on hold for the queue, once its members have saved and stopped."""
        self.set(pause=f"waiting in the queue: {why}; it goes on by itself", recalled=True)

    def halted(self) -> bool:
        """Whether every member has saved and stopped, or the deadline of the stop has passed."""
        record = self.record
        if record.gen == 0 or record.stop_deadline is None or self.now >= record.stop_deadline:
            return True
        return all(self.queries.ended(index, slot, record.gen) for index, slot in self.members())

    def vacate(self, index: int, cause: str) -> None:
        """Supersede a node's ``cur``.

        Its machine is deleted later, from the written record (rule 5 of ``docs/protocol.md``).
        """
        self.put(index, cur=None, cause=cause, vacant_since=self.now)

    def promote(self, index: int, cause: str) -> None:
        """Make a node's ``next`` its ``cur``, as INTENT or ADMITTED, and clear the reason for the replacement."""
        following = self.nodes[index].next
        assert following is not None
        state = SlotState.INTENT if following.state is SlotState.INTENT else SlotState.ADMITTED
        since = following.since if state is SlotState.INTENT else self.now
        slot = replace(following, state=state, since=since, cause=cause)
        self.put(index, cur=slot, next=None, replace_reason=None, refused=())
        self.log(Event.PROMOTED, f"r{index}.a{slot.attempt}", node=index, slot=slot, cause=cause)

    def end(self, outcome: Outcome, reason: str, node: int | None = None) -> None:
        """End the job and supersede all its machines in the same write. ``node``: the node that caused the end."""
        nodes = tuple(replace(node, cur=None, next=None, replace_reason=None, copy=None) for node in self.nodes)
        self.set(
            phase=Phase.END,
            outcome=outcome,
            reason=reason,
            nodes=nodes,
            stop=False,
            roll=None,
            move=None,
            asked_zone=None,
            pause="",
            recalled=False,
            **NO_HOLD,
        )
        self.log(Event.END, "job", node=node, cause=outcome.value, detail=reason)

    def fail(self, reason: str, node: int | None = None) -> None:
        """Hold a job because its own code failed; end a trial, and a job whose file says ``hold_days: 0``."""
        spec = self.snapshot.spec
        days = spec.hold_days if spec is not None else HOLD_DAYS
        if days and self.record.trial is None:  # the other trials of its search wait for its end
            self.hold(Hold.FAILURE, reason, ends=self.now + days * DAY_S, node=node)
        else:
            self.end(Outcome.FAILED, reason, node)

    def hold(
        self,
        why: Hold,
        reason: str,
        *,
        until: float | None = None,
        ends: float | None = None,
        node: int | None = None,
    ) -> None:
        """Hold the job: give up its machines, keep its disks.

        ``until``: when the hold ends by itself; ``ends``: when the job ends; both virtual unix seconds.
        """
        nodes = tuple(
            replace(each, cur=None, next=None, replace_reason=None, refused=(), vacant_since=self.now)
            for each in self.nodes
        )
        self.set(
            phase=Phase.HOLD,
            reason=reason,
            nodes=nodes,
            roll=None,
            pause="",
            recalled=False,
            dry_since=None,
            short_since=None,
            hold=why,
            hold_until=until,
            hold_ends=ends,
            hold_late=None,
            hold_count=self.record.hold_count + (why not in (Hold.QUEUE, Hold.RUNG)),  # these are no failed tries
        )
        if why is not Hold.CAPACITY:  # between its tries the job lacks machines for the market too
            self.stop_wait()
        if self.record.gen:
            self.set(stop=True, stop_deadline=self.now)
        self.log(Event.HOLD, f"v{self.record.ver + 1}", node=node, cause=why.value, detail=reason)

    def release(self, cause: str, detail: str = "") -> None:
        """End a hold and run again. ``cause``: the cause of the next attempts and their generation."""
        budget = self.record.budget
        if self.record.hold is Hold.FAILURE:
            budget = replace(budget, crashes=0, crashed_gen=-1)
        nodes = tuple(replace(node, cause=cause) for node in self.nodes)
        self.set(
            phase=Phase.RUN,
            reason="",
            nodes=nodes,
            budget=budget,
            **NO_HOLD,
        )
        if cause == "resume":
            self.set(market_since=None, market_wait_s=0.0, fell_back=False)
        if self.record.gen:
            self.set(stop_since=self.now)  # timeouts for machines and disks start now
        if (move := self.record.move) is not None:  # and so do those of a move, whose time is measured from here
            self.set(move=replace(move, since=self.now, silent_since=None))
        self.log(Event.RESUME, f"v{self.record.ver + 1}", cause=cause, detail=detail)

    def back_on_spot(self) -> None:
        """Note that a job trains on spot again after fallbacks: the next one does not continue them."""
        record = self.record
        over = record.fell_back and record.fallback_until <= self.now and record.gen > 0 and not record.stop
        if over and not any(map(_on_demand, self.nodes)):
            self.set(fell_back=False)

    def stop_wait(self) -> None:
        """Stop the clock of the wait for the market; it goes on when the market is the obstacle again."""
        since = self.record.market_since
        if since is not None:
            waited_s = self.record.market_wait_s + max(0.0, self.now - since)
            self.set(market_since=None, market_wait_s=waited_s)

    def count_loss(self, index: int, slot: Slot) -> None:
        """Count the preemption of a spot machine, and start an on-demand fallback after too many."""
        budget, rules = self.record.budget, self.times.fallback
        if slot.model is not Model.SPOT:
            return
        short = budget.short_lives + 1 if self.now - slot.since < rules.short_life_s else 0
        times = (*budget.loss_times, self.now)[-KEPT_LOSSES:]
        self.set(budget=replace(budget, preemptions=budget.preemptions + 1, loss_times=times, short_lives=short))
        recent = [at for at in times if self.now - at <= rules.window_s]
        if len(recent) >= rules.losses + len(self.nodes) or short >= rules.short_lives:
            told = f"{len(recent)} losses in {(self.now - recent[0]) / 60:.0f} min in {slot.zone}"
            self.fall_back("too many losses" if short < rules.short_lives else "lives too short", told)

    def fall_back(self, cause: str = "", told: str = "") -> None:
        """Start an on-demand fallback, unless one is active.

        Args:
            cause: "": spot was refused.
            told: its reason as a text for the ledger.
        """
        if self.record.fallback_until > self.now:
            return
        if self.record.fell_back:
            cause = f"{NO_SPOT_YET}: {cause}" if cause else NO_SPOT_YET
        until = self.now + self.times.fallback.on_demand_s
        self.set(fallback_until=until, fell_back=True)
        cause = cause or "no spot in the zone"
        again = f"spot again at {time_of_day(until)}"
        self.log(Event.FALLBACK, f"v{self.record.ver + 1}", cause=cause, detail=f"{told}, {again}" if told else again)


def _on_demand(node: Node) -> int:
    return sum(slot is not None and slot.model is Model.ON_DEMAND for slot in (node.cur, node.next))
