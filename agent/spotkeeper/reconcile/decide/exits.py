"""How a generation ends by itself: success, failure, and the crash budget.

Exit 93 means "a restart cannot help". Exit 0 from every member at the newest generation is success. Any
other code opens a roll call first: only if everyone answers was it the job's own crash; a machine that is
missing makes it a loss, and a loss never consumes the crash budget. A step that does not come is no crash until an
agent calls it a hang (``hang``): how long it may take is the script's to say. A job that failed holds: what it has
learnt is worth more than its disks cost until somebody has looked.
"""

from __future__ import annotations

from msgspec.structs import replace

from spotkeeper.reconcile.decide import fuses, hang, sick, slots
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.spec.facts import Kind
from spotkeeper.spec.failure import Failure
from spotkeeper.spec.hang import CAUSE as HANG
from spotkeeper.spec.ledger import Event
from spotkeeper.spec.record import Outcome, Phase, Roll, Slot

FATAL = 93  # the job's word for "a restart cannot help"


def step(draft: Draft) -> None:
    record = draft.record
    if record.gen == 0 or record.phase is not Phase.RUN:
        return
    codes = _codes(draft)
    if FATAL in codes.values():
        rank = min(rank for rank, code in codes.items() if code == FATAL)
        draft.fail(f"rank {rank} exited with {FATAL}: a restart cannot help", rank)
        return
    members = draft.members()
    if members and len(members) == len(record.members) and all(codes.get(index) == 0 for index, _ in members):
        draft.end(Outcome.SUCCEEDED, "every member exited with 0")
        return
    if record.stop:
        return
    if record.roll is not None:
        _close(draft, codes)
    elif any(code != 0 for code in codes.values()):
        _failed(draft, codes)
    else:
        _quiet(draft)


def _codes(draft: Draft) -> dict[int, int]:
    """Exit codes by rank, of the newest generation. The worst one counts where a machine reported several."""
    out: dict[int, int] = {}
    for index, slot in draft.members():
        for fact in draft.view.said(index, slot, Kind.EXIT, draft.record.gen):
            code = _number(fact.value)
            if index not in out or code == FATAL or (out[index] == 0 and code != 0):
                out[index] = code
    return out


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        return 1


def _failed(draft: Draft, codes: dict[int, int]) -> None:
    """A process died. Where a machine is under notice, that is why: no roll call, no crash."""
    if why := _going(draft):
        draft.halt(draft.now, why)
        return
    rank, code = _worst(draft, codes)[0]
    call(draft, "exit", detail=f"rank {rank} exited with {code}", exits=True)


def _going(draft: Draft) -> str:
    """Why members are about to go, by what is known by now (the record hears of it after the exit); "": none is.

    ``loss`` where one is found stopping of which nobody gave notice.
    """
    view = draft.view
    going = [(i, slot) for i, slot in draft.members() if slot.notice is not None or view.notice(i, slot) is not None]
    warned = all(view.warned(i, slot) for i, slot in going)
    return ("notice" if warned else "loss") if going else ""


def call(draft: Draft, cause: str, detail: str = "", exits: bool = False) -> None:
    """Every member must answer this version of the document."""
    draft.set(roll=Roll(ver=draft.before.ver + 1, since=draft.now, cause=cause, exits=exits))
    draft.log(Event.ROLL, f"v{draft.before.ver + 1}", cause=cause, detail=detail)


def answered(draft: Draft, index: int, slot: Slot, roll: Roll) -> bool:
    """An answer counts for this version or a later one: an old answer would keep a hung machine for ever."""
    return any(fact.value.isdigit() and int(fact.value) >= roll.ver for fact in draft.view.said(index, slot, Kind.HERE))


def _close(draft: Draft, codes: dict[int, int]) -> None:
    roll = draft.record.roll
    assert roll is not None
    missing = [(index, slot) for index, slot in draft.members() if not answered(draft, index, slot, roll)]
    if missing:
        if draft.now > roll.since + draft.times.roll_s and not fuses.deaf(draft, len(missing)):
            for index, slot in missing:
                if slot.zone in draft.view.answered:
                    slots.lose(draft, index, "silence")
        return
    if any(draft.view.gone(index, slot) for index, slot in draft.members()):
        return  # it answered and then went: the room of losses takes it from here
    if roll.exits or any(codes.values()):
        if why := _going(draft):  # a machine that goes down ends the job's processes first, and still answers
            draft.halt(draft.now, why)
        elif not sick.give_up(draft):
            bad = _worst(draft, codes)
            why = f"rank {bad[0][0]} exited with {bad[0][1]}" if bad else "a rank's process ended"
            _crash(draft, bad[0][0] if bad else None, why + sick.note(draft))
    elif roll.cause == HANG:
        # A rank that is through says nothing against the others: one of them may evaluate for a while.
        if (verdict := hang.judge(draft, roll, frozenset(codes))) is not None:
            _crash(draft, verdict.rank, verdict.why, HANG)
    else:
        draft.set(roll=None, roll_at=draft.now)


def _crash(draft: Draft, rank: int | None, why: str, cause: str = "crash") -> None:
    record = draft.record
    crashes = record.budget.crashes + 1
    draft.set(budget=replace(record.budget, crashes=crashes, crashed_gen=record.gen), roll=None, roll_at=draft.now)
    draft.log(Event.CRASH, f"g{record.gen}", rank=rank, cause=cause, detail=why)
    allowed = draft.seen.spec.retry.crashes if draft.seen.spec else 0
    if crashes > allowed:
        draft.fail(f"{why}; the crash budget of {allowed} is used up", rank)
        return
    draft.halt(draft.now, "crash")


def _worst(draft: Draft, codes: dict[int, int]) -> list[tuple[int, int]]:
    """Ranks that failed, with their codes, the likeliest cause first.

    That is the earliest that failed of itself. Of whom nothing is known was killed with its launcher, or has an older
    agent: then the code counts, for who only lost a peer exits with 1.
    """

    def order(rank: int, code: int) -> tuple[int, int, int, int]:
        failure = _failure(draft, rank)
        if failure is None:
            return 1, 0, -code, rank
        return 2 if failure.follows else 0, failure.at_ms, -code, rank

    return sorted(((rank, code) for rank, code in codes.items() if code != 0), key=lambda one: order(*one))


def _failure(draft: Draft, rank: int) -> Failure | None:
    slot = draft.ranks[rank].cur
    facts = draft.view.said(rank, slot, Kind.FAILED, draft.record.gen) if slot is not None else []
    found = [failure for fact in facts if (failure := Failure.parse(fact.value)) is not None]
    return min(found, key=Failure.order, default=None)


def _last_progress(draft: Draft) -> float:
    record, progress = draft.record, draft.seen.progress
    at = progress.at if progress is not None and progress.gen == record.gen else 0.0
    return max(record.gen_since, at)


def quiet_since(draft: Draft) -> float:
    """The newest sign of life: progress of this generation, its start, or a roll call that all answered."""
    return max(_last_progress(draft), draft.record.roll_at)


def _quiet(draft: Draft) -> None:
    """Silence or a stall leads to a roll call."""
    record = draft.record
    if len(draft.members()) < len(record.members):
        return
    stalled = any(draft.view.said(index, slot, Kind.SLOW, record.gen) for index, slot in draft.members())
    if hang.due(draft):
        call(draft, HANG)
    elif draft.now - quiet_since(draft) > draft.times.silence_s:
        call(draft, "silence")
    elif stalled and draft.now - record.roll_at > draft.times.silence_s:
        call(draft, "stall")
