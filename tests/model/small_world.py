"""A world small enough to be searched to the end, moved by the shipped ``decide()``.

One zone, one or two ranks, two rounds that read, look and act in separate steps and may stall or die at any
of them. Time has two values: now, and "every deadline has passed" (a budgeted look at ``LATE``). Records are
compared by content: ``ver`` and the ledger play no part in decisions, so they are left out.

A state is a plain tuple; ``moves`` gives every next state with a name for the story; ``broken`` says which
safety property a state or a move violates; ``settle`` runs without faults and says why it does not converge.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from msgspec.structs import replace
from spotkeeper.reconcile.decide import Decision, Seen, Times, decide
from spotkeeper.reconcile.document import state as doc_state
from spotkeeper.spec import names
from spotkeeper.spec.cloud import (
    Action,
    AttachDisk,
    Class,
    CreateDisk,
    DeleteDisk,
    DeleteVm,
    DetachDisk,
    Disk,
    InsertVm,
    Listing,
    Result,
    Vm,
    VmStatus,
)
from spotkeeper.spec.facts import Fact, Kind
from spotkeeper.spec.generation import DocState
from spotkeeper.spec.job import Ask, AskKind, Checkpoint, JobSpec
from spotkeeper.spec.model import Model
from spotkeeper.spec.record import Alloc, Budget, Phase, Rank, Record, SlotState
from spotkeeper.spec.stack import PoolState, Price, StackState

JOB, STACK, ZONE = "abcd2345", "m", "z"
NOW, LATE, DEADLINE = 0.0, 1_000_000.0, 500.0
UID = "00000000-0000-0000-0000-000000000001"
CALM = Times(cold_s=0.0, losses=99, short_lives=99, free_s=-1.0, silence_s=1e12, hang_s=1e12, bout_s=0.0, disk_s=1e12)


class V(NamedTuple):
    """A machine. ``gen``: the generation its processes are of; ``alive``: they run."""

    rank: int
    attempt: int
    stopping: bool = False
    boot: int = 0
    gen: int = 0
    alive: bool = False
    disk: bool = False  # the generation began with its disk attached: it writes
    noticed: bool = False

    @property
    def uid(self) -> str:
        return f"u{self.rank}-{self.attempt}"


class D(NamedTuple):
    """A disk: who holds it, and the newest commit on it (a generation; 0: blank)."""

    rank: int
    number: int
    user: str = ""
    commit: int = 0


class R(NamedTuple):
    """A round under way: the record it read; then what it decided and has yet to do."""

    record: Record
    alloc: Alloc | None = None
    decision: Decision | None = None
    todo: tuple[Action, ...] = ()


class Faults(NamedTuple):
    """How often each fault may still happen."""

    kills: int = 0
    notices: int = 0
    reprieves: int = 0
    reboots: int = 0
    refusals: int = 0
    blinds: int = 0
    lates: int = 0
    cancels: int = 0
    swaps: int = 0
    attempts: int = 4  # bound of the search, not a fault


class S(NamedTuple):
    record: Record
    alloc: Alloc
    vms: frozenset[V]
    disks: frozenset[D]
    facts: frozenset[Fact]
    keys: frozenset[tuple[int, int]]
    ops: frozenset[Result]
    asks: tuple[Ask, ...]
    newest: int
    rounds: tuple[R | None, ...]
    left: Faults
    why: str = ""  # a safety property that the last move broke


class Story(NamedTuple):
    """Bounds of one search."""

    ranks: int = 1
    replicated: bool = True
    rounds: int = 2
    left: Faults = Faults()


class SmallWorld:
    """The transition system of one story."""

    def __init__(self, story: Story, decider: object = decide) -> None:
        self.story, self.decide = story, decider
        prices = {ZONE: Price(on_demand=1.0, spot=0.3)}
        pool = PoolState("p", "spot", "m", (ZONE,), 1, 2 * story.ranks + 1, 0, 1, "pd", prices)
        self.stack = StackState(STACK, "gcp", "p", "r", "b", (pool,))
        self.spec = JobSpec("j", ("x",), story.ranks, policy="spot", checkpoint=Checkpoint(replicated=story.replicated))

    def start(self) -> S:
        record = Record(job=JOB, uid=UID, name="j", spec_sha256="", created=0.0, ranks=(Rank(),) * self.story.ranks)
        empty: frozenset[object] = frozenset()
        rounds: tuple[R | None, ...] = (None,) * self.story.rounds
        return S(record, Alloc(), empty, empty, empty, empty, empty, (), 0, rounds, self.story.left)  # type: ignore[arg-type]

    # -- every next state

    def moves(self, s: S) -> Iterator[tuple[str, S]]:
        yield from self._rounds(s)
        yield from self._agents(s)
        yield from self._faults(s)

    def _rounds(self, s: S) -> Iterator[tuple[str, S]]:
        for index, r in enumerate(s.rounds):
            if r is None:
                if index == 0 or s.rounds[index - 1] is not None:  # rounds are alike: the first free one starts
                    yield f"round {index} reads", self._with(s, index, R(s.record))
                continue
            if r.decision is None:
                yield f"round {index} looks", self._look(s, index, r, NOW, True)
                if s.left.blinds:
                    yield f"round {index} looks, blind", self._look(self._spend(s, "blinds"), index, r, NOW, False)
                if s.left.lates:
                    yield f"round {index} looks, late", self._look(self._spend(s, "lates"), index, r, LATE, True)
                continue
            yield f"round {index} dies", self._with(s, index, None)
            yield from self._act(s, index, r)

    def _look(self, s: S, index: int, r: R, now: float, answered: bool) -> S:
        decision = self._decide(r.record, s, now, answered)
        if decision.quiet:
            return self._with(s, index, None)
        return self._with(s, index, R(r.record, s.alloc, decision, decision.actions))

    def _decide(self, record: Record, s: S, now: float, answered: bool) -> Decision:
        seen = Seen(
            stack=self.stack,
            spec=self.spec,
            listing=self._listing(s, answered),
            now=now,
            facts=tuple(sorted(s.facts, key=lambda fact: fact.key())),
            asks=s.asks,
            alloc=s.alloc,
            save_s=1.0,
            times=CALM,
        )
        return self.decide(record, seen)  # type: ignore[operator, no-any-return]

    def _listing(self, s: S, answered: bool) -> Listing:
        if not answered:
            return Listing((), (), (), frozenset(), tuple(s.ops))
        held = {d.user: d for d in s.disks if d.user}
        vms = tuple(_vm(v, _disk_name(held[v.uid]) if v.uid in held else "") for v in sorted(s.vms))
        return Listing(vms, tuple(_disk(d) for d in sorted(s.disks)), (), frozenset({ZONE}), tuple(s.ops))

    def _act(self, s: S, index: int, r: R) -> Iterator[tuple[str, S]]:
        assert r.decision is not None
        if r.decision.record is not None:
            if s.record != r.record:
                return  # lost: same as dying
            new = plain(r.decision.record)
            why = self._unjust(s, new)
            yield f"round {index} writes the record", self._with(s._replace(record=new, why=why), index, R(new))
        elif r.decision.grants is not None:
            if s.alloc == r.alloc:
                grants = tuple(replace(g, since=0.0) for g in r.decision.grants.grants)
                new_alloc = Alloc(grants=tuple(sorted(grants, key=lambda g: (g.rank, g.attempt))))
                yield f"round {index} writes grants", self._with(s._replace(alloc=new_alloc), index, R(r.record))
        else:
            rest = r.todo[1:]
            after = R(r.record, r.alloc, r.decision, rest) if rest else None
            for name, done in self._call(s, r.todo[0]):
                yield f"round {index}: {name}", self._with(done, index, after)

    def _call(self, s: S, action: Action) -> Iterator[tuple[str, S]]:
        match action:
            case InsertVm(rank=rank, attempt=attempt):
                key = (rank, attempt)
                if key not in s.keys:
                    if s.left.refusals:
                        refused = Result(action, Class.CAPACITY)
                        yield f"insert {key} refused", self._spend(s, "refusals")._replace(ops=s.ops | {refused})
                    yield f"insert {key}", s._replace(vms=s.vms | {V(rank, attempt)}, keys=s.keys | {key})
                elif not any((v.rank, v.attempt) == key for v in s.vms):
                    yield f"key of {key} is dead", s._replace(ops=s.ops | {Result(action, Class.DEAD_KEY)})
                else:
                    yield f"insert {key} again", s
            case DeleteVm(uid=uid):
                found = [v for v in s.vms if v.uid == uid]
                live = [slot.attempt for r in s.record.ranks for slot in (r.cur, r.next) if slot is not None]
                wrong = [v for v in found if v.attempt in _live(s.record, v.rank)]
                why = f"deletes the live {uid}" if wrong and live else ""
                gone = frozenset(v._replace(stopping=True) if v.uid == uid else v for v in s.vms)
                yield f"delete {uid}", s._replace(vms=gone, why=why)
            case AttachDisk(disk=disk, vm_uid=uid):
                yield f"attach {disk[-8:]} to {uid}", self._attach(s, disk, uid)
            case DetachDisk(disk=disk, vm_uid=uid):
                free = frozenset(d._replace(user="") if _disk_name(d) == disk and d.user == uid else d for d in s.disks)
                writes = [v for v in s.vms if v.uid == uid and v.alive]
                why = "detaches the disk of one that trains" if writes and free != s.disks else ""
                yield f"detach from {uid}", s._replace(disks=free, why=why)
            case CreateDisk(rank=rank, number=number):
                there = any((d.rank, d.number) == (rank, number) for d in s.disks)
                yield "create disk", s if there else s._replace(disks=s.disks | {D(rank, number)})
            case DeleteDisk(disk=disk):
                kept = frozenset(d for d in s.disks if _disk_name(d) != disk or d.user)
                yield "delete disk", s._replace(disks=kept)
            case _:
                raise AssertionError(action)

    @staticmethod
    def _attach(s: S, disk: str, uid: str) -> S:
        if not any(v.uid == uid and not v.stopping for v in s.vms):
            return s
        done = frozenset(d._replace(user=uid) if _disk_name(d) == disk and d.user in ("", uid) else d for d in s.disks)
        return s._replace(disks=done)

    # -- agents and training

    def _agents(self, s: S) -> Iterator[tuple[str, S]]:
        for v in s.vms:
            if v.stopping:
                yield f"{v.uid} is gone", self._gone(s, v)
                continue
            hello = Fact(v.uid, f"b{v.boot}", v.rank, v.attempt, 0, Kind.HELLO)
            if hello not in s.facts:
                yield f"{v.uid} says hello", s._replace(facts=s.facts | {hello})
            polled = self._poll(s, v)
            if polled is not None:
                yield f"{v.uid} polls", polled
        committed = self._commit(s)
        if committed is not None:
            yield "commit", committed

    @staticmethod
    def _gone(s: S, v: V) -> S:
        return s._replace(
            vms=s.vms - {v}, disks=frozenset(d._replace(user="") if d.user == v.uid else d for d in s.disks)
        )

    def _poll(self, s: S, v: V) -> S | None:
        """The agent reads the document and obeys; None where it changes nothing."""
        record = s.record
        released = Fact(v.uid, f"b{v.boot}", v.rank, v.attempt, record.gen, Kind.RELEASED)
        if v.attempt not in _live(record, v.rank):
            if v.attempt > record.ranks[v.rank].top:
                return None
            freed = Fact(v.uid, f"b{v.boot}", v.rank, v.attempt, 0, Kind.FREED, str(record.ranks[v.rank].disk))
            return s._replace(vms=s.vms - {v} | {v._replace(alive=False, stopping=True)}, facts=s.facts | {freed})
        slot = record.ranks[v.rank].cur
        if slot is None or slot.attempt != v.attempt or slot.state is not SlotState.MEMBER or slot.boot != f"b{v.boot}":
            return None
        stop = doc_state(record) is DocState.SAVE_STOP
        if stop and released not in s.facts:  # also one that never came to start it
            done = v._replace(alive=False, gen=record.gen)
            return s._replace(vms=s.vms - {v} | {done}, facts=s.facts | {released})
        if not stop and v.gen < record.gen:
            disk = slot.disk and any(d.user == v.uid for d in s.disks)
            new = v._replace(gen=record.gen, alive=True, disk=disk)
            return self._restored(s._replace(vms=s.vms - {v} | {new}))
        return None

    def _gang(self, s: S) -> list[V]:
        """The newest generation's machines, where all of them train; else none."""
        record = s.record
        alive = [v for v in s.vms if v.alive and v.gen == record.gen]
        return alive if record.gen and len(alive) == len(record.members) else []

    def _restored(self, s: S) -> S:
        """All are there: what they start from must be the newest commit there is."""
        gang = self._gang(s)
        if not gang:
            return s
        uids = {v.uid for v in gang if v.disk}
        best = max((d.commit for d in s.disks if d.user in uids), default=0)
        return s if best == s.newest else s._replace(why=f"starts from commit {best}, the newest is {s.newest}")

    def _commit(self, s: S) -> S | None:
        gang = self._gang(s)
        uids = {v.uid for v in gang if v.disk}
        if not uids or s.newest == s.record.gen:
            return None
        gen = s.record.gen
        return s._replace(newest=gen, disks=frozenset(d._replace(commit=gen) if d.user in uids else d for d in s.disks))

    # -- faults

    def _faults(self, s: S) -> Iterator[tuple[str, S]]:
        for v in s.vms:
            if v.stopping:
                continue
            if s.left.kills:
                yield f"{v.uid} is killed", self._gone(self._spend(s, "kills"), v)
            if v.noticed:
                yield f"{v.uid} dies of its notice", self._gone(s, v)
                if s.left.reprieves:
                    yield f"{v.uid} is reprieved", self._reprieve(self._spend(s, "reprieves"), v)
            elif s.left.notices:
                yield f"{v.uid} gets notice", self._notice(self._spend(s, "notices"), v)
            if s.left.reboots:
                fresh = v._replace(boot=v.boot + 1, alive=False, gen=0, disk=False)
                yield f"{v.uid} reboots", self._spend(s, "reboots")._replace(vms=s.vms - {v} | {fresh})
        if s.left.cancels:
            yield "cancel is asked", self._spend(s, "cancels")._replace(asks=(Ask("c", AskKind.CANCEL, 0.0),))
        if s.left.swaps and s.record.gen:
            yield "swap is asked", self._spend(s, "swaps")._replace(asks=(Ask("s", AskKind.SWAP, 0.0, rank=0),))

    @staticmethod
    def _notice(s: S, v: V) -> S:
        fact = Fact(v.uid, f"b{v.boot}", v.rank, v.attempt, v.gen, Kind.NOTICE, f"{DEADLINE:.0f}")
        return s._replace(vms=s.vms - {v} | {v._replace(noticed=True)}, facts=s.facts | {fact})

    @staticmethod
    def _reprieve(s: S, v: V) -> S:
        fact = Fact(v.uid, f"b{v.boot}", v.rank, v.attempt, v.gen, Kind.REPRIEVE, f"{DEADLINE:.0f}")
        return s._replace(vms=s.vms - {v} | {v._replace(noticed=False)}, facts=s.facts | {fact})

    @staticmethod
    def _spend(s: S, what: str) -> S:
        return s._replace(left=s.left._replace(**{what: getattr(s.left, what) - 1}))

    @staticmethod
    def _with(s: S, index: int, r: R | None) -> S:
        return s._replace(rounds=(*s.rounds[:index], r, *s.rounds[index + 1 :]))

    # -- safety

    def _unjust(self, s: S, new: Record) -> str:
        """A member given up without a fact or a wish; a counter that goes back; a phase that returns."""
        old = s.record
        if new.gen < old.gen or (old.phase is not Phase.RUN and new.phase is Phase.RUN):
            return "the record goes back"
        for index, (before, after) in enumerate(zip(old.ranks, new.ranks, strict=True)):
            if after.top < before.top or after.disk_top < before.disk_top:
                return "a counter goes back"
            given_up = before.cur is not None and (after.cur is None or after.cur.attempt != before.cur.attempt)
            if not given_up or before.cur is None or before.cur.state is not SlotState.MEMBER:
                continue
            healthy = any(v.uid == before.cur.uid and not v.stopping and not v.noticed for v in s.vms)
            told = any(f.rank == index and f.kind is Kind.NOTICE for f in s.facts)
            wished = before.wish is not None or new.phase is not Phase.RUN
            if healthy and not told and not wished:
                return f"gives up the healthy member {before.cur.uid}"
        return ""

    def broken(self, s: S) -> str:
        """The safety property that does not hold here, or ''."""
        training = [(v.rank, v.gen) for v in s.vms if v.alive]
        if len(set(training)) != len(training):
            return "two members of one rank and generation"
        keys = [(g.job, g.rank, g.attempt) for g in s.alloc.grants]
        if len(set(keys)) != len(keys):
            return "a grant is doubled"
        return s.why

    # -- convergence

    def settle(self, s: S, good: set[S]) -> str:
        """Run without faults, stalled rounds dead: why it does not end well, or ''."""
        s = s._replace(rounds=(None,) * len(s.rounds), why="")
        path = []
        for v in list(s.vms):
            if v.noticed:
                s = self._gone(s, v)  # its deadline comes
        for _ in range(60):
            if s in good:
                good.update(path)
                return ""
            path.append(s)
            after = self._fair(s)
            if broken := self.broken(after):
                return f"while settling: {broken}"
            if after == s:
                why = self._unsettled(s)
                if not why:
                    good.update(path)
                return why
            s = after
        return "does not come to rest"

    def _fair(self, s: S) -> S:
        """One round to its end, then everyone moves once."""
        record = s.record
        for _ in range(12):
            decision = self._decide(record, s, NOW, True)
            if decision.record is not None:
                s = s._replace(record=plain(decision.record), why=self._unjust(s, decision.record))
                record = s.record
            elif decision.grants is not None:
                grants = tuple(replace(g, since=0.0) for g in decision.grants.grants)
                s = s._replace(alloc=Alloc(grants=tuple(sorted(grants, key=lambda g: (g.rank, g.attempt)))))
            else:
                for action in decision.actions:
                    s = list(self._call(s, action))[-1][1]
                break
        for v in sorted(s.vms):
            if v.stopping:
                s = self._gone(s, v)
                continue
            if v.attempt not in _live(s.record, v.rank):
                continue  # an agent that never came up cannot obey: rounds must collect its machine
            s = s._replace(facts=s.facts | {Fact(v.uid, f"b{v.boot}", v.rank, v.attempt, 0, Kind.HELLO)})
            s = self._poll(s, v) or s
        return self._commit(s) or s

    def _unsettled(self, s: S) -> str:
        record = s.record
        if record.phase in (Phase.END, Phase.DONE):
            left = s.vms or s.disks or s.alloc.grants
            return "" if record.phase is Phase.DONE and not left else f"ended, but {record.phase}: {left}"
        if len(s.vms) != len(record.ranks) or not self._gang(s):
            return f"not all train: gen {record.gen}, stop {record.stop}, {sorted(s.vms)}"
        if s.newest != record.gen:
            return "they train, but nobody can write a checkpoint"
        live = {(i, slot.attempt) for i, r in enumerate(record.ranks) for slot in (r.cur, r.next) if slot}
        granted = {(g.rank, g.attempt) for g in s.alloc.grants}
        return "" if live == granted else f"grants {granted} of live {live}"


def plain(record: Record) -> Record:
    """The record without what decisions do not read, its times as 'now' or 'later'."""
    ranks = tuple(
        replace(
            rank,
            cur=replace(rank.cur, since=0.0) if rank.cur else None,
            next=replace(rank.next, since=0.0) if rank.next else None,
            refused_at=0.0,
            vacant_since=0.0,
        )
        for rank in record.ranks
    )
    deadline = record.stop_deadline
    return replace(
        record,
        ver=0,
        outbox=(),
        ranks=ranks,
        gen_since=0.0,
        stop_since=0.0,
        stop_deadline=None if deadline is None else NOW if deadline in (NOW, LATE) else DEADLINE,
        budget=Budget(),
        bout_until=0.0,
        dry_since=None if record.dry_since is None else NOW,
        roll_at=0.0,
    )


def _live(record: Record, rank: int) -> set[int]:
    found = (record.ranks[rank].cur, record.ranks[rank].next)
    return {slot.attempt for slot in found if slot is not None}


@lru_cache(maxsize=65536)
def _vm(v: V, disk: str) -> Vm:
    name = names.vm_name(STACK, JOB, v.rank, v.attempt)
    status = VmStatus.STOPPING if v.stopping else VmStatus.RUNNING
    return Vm(name, v.uid, ZONE, status, "p", JOB, v.rank, v.attempt, "a", (disk,) if disk else (), Model.SPOT)


@lru_cache(maxsize=65536)
def _disk(d: D) -> Disk:
    attempt = d.user.partition("-")[2]
    users = (names.vm_name(STACK, JOB, d.rank, int(attempt)),) if d.user else ()
    return Disk(_disk_name(d), ZONE, JOB, d.rank, d.number, users)


def _disk_name(d: D) -> str:
    return names.disk_name(STACK, JOB, d.rank, d.number)
