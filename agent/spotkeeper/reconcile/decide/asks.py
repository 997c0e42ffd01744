"""What users ask for: cancel, pause, resume, move, swap, resize. Only reconcile writes the record.

Every ask is taken in exactly once (its id goes into ``asks_done`` in the same write) and leaves an entry
in the ledger; a refused one says why.
"""

from __future__ import annotations

from collections.abc import Callable

from spotkeeper.reconcile.decide import files, fuses, kept, moves, sizes
from spotkeeper.reconcile.decide.draft import DAY_S, Draft
from spotkeeper.spec.job import Ask, AskKind
from spotkeeper.spec.ledger import Event
from spotkeeper.spec.model import Model
from spotkeeper.spec.record import Hold, Outcome, Phase, SlotState

KEPT_ASKS = 64


def step(draft: Draft) -> None:
    for ask in draft.seen.asks:
        if ask.id in draft.record.asks_done:
            continue
        refused = _take(draft, ask)
        draft.set(asks_done=_kept((*draft.record.asks_done, ask.id), {each.id for each in draft.seen.asks}))
        draft.log(
            Event.ASK,
            ask.id,
            rank=ask.rank,
            cause=ask.kind.value,
            detail=f"refused: {refused}" if refused else f"by {ask.by}" if ask.by else "",
        )
        if draft.record.phase in (Phase.END, Phase.DONE):
            return


def _kept(done: tuple[str, ...], waiting: set[str]) -> tuple[str, ...]:
    """The newest few, and all that are not deleted yet: those would be taken in once more."""
    return tuple(ask for at, ask in enumerate(done, start=KEPT_ASKS - len(done)) if at >= 0 or ask in waiting)


def _take(draft: Draft, ask: Ask) -> str:
    """Do it, or say in one line why not."""
    if draft.record.phase in (Phase.END, Phase.DONE):
        return "the job has ended"
    return _TAKERS[ask.kind](draft, ask)


def _cancel(draft: Draft, ask: Ask) -> str:
    draft.end(Outcome.CANCELLED, f"cancelled by {ask.by}" if ask.by else "cancelled")
    return ""


def _resize(draft: Draft, ask: Ask) -> str:
    return sizes.ask(draft, ask.nodes)


def _move(draft: Draft, ask: Ask) -> str:
    return moves.ask(draft, ask.zone)


def _pause(draft: Draft, ask: Ask) -> str:
    if draft.record.phase is Phase.HOLD:
        return "it is on hold already"
    reason = f"paused by {ask.by}" if ask.by else "paused"
    if not draft.members():
        draft.hold(Hold.PAUSE, reason)
        return ""
    draft.set(pause=reason)
    draft.halt(draft.now + draft.save_s() + draft.times.stop_s, "pause")
    return ""


def _resume(draft: Draft, ask: Ask) -> str:
    changed = ""
    if ask.spec_sha256 is not None and ask.spec_sha256 != draft.record.spec_sha256:
        refused, changed = files.adopt(draft, ask.spec_sha256)
        if refused:
            return refused
    holds = draft.record.phase is Phase.HOLD
    if not holds and not draft.record.pause and not (ask.go_back and kept.lacking(draft)):
        return "it is not on hold" + (", and waits for no checkpoint" if ask.go_back else "")
    fuses.forgive(draft)
    lost = kept.newest(draft) if ask.go_back else None
    if lost is not None:
        draft.set(given_up=kept.text(lost))
        changed = ", ".join(filter(None, (changed, f"without checkpoint {kept.text(lost)} if that cannot be had")))
    if holds:
        draft.release("resume", changed)
        return ""
    draft.set(pause="")
    if lost is not None:
        draft.log(Event.RESUME, f"v{draft.before.ver + 1}", cause="resume", detail=changed)
    return ""


def held(draft: Draft) -> None:
    """A hold with a time on it is left by itself: tried again (L5), or ended with its disks."""
    record = draft.record
    if record.phase is not Phase.HOLD:
        return
    if record.hold_until is not None and draft.now >= record.hold_until:
        draft.release("retry")
    elif record.hold_ends is not None and draft.now >= record.hold_ends:
        draft.end(Outcome.FAILED, f"nobody resumed it in time: {record.reason}")


def _swap(draft: Draft, ask: Ask) -> str:
    if ask.rank is None or not 0 <= ask.rank < len(draft.ranks):
        return f"rank {ask.rank} is not one of 0..{len(draft.ranks) - 1}"
    cur = draft.ranks[ask.rank].cur
    if cur is None or cur.state is not SlotState.MEMBER:
        return f"rank {ask.rank} is being replaced already"
    if cur.model is Model.STATIC:
        return f"rank {ask.rank} is a static node, with its data on its own disk"
    if draft.ranks[ask.rank].wish is None:
        draft.put(ask.rank, wish="user", next=None)
    return ""


def paused(draft: Draft) -> None:
    """A pause that was asked for becomes a hold once the members have saved and stopped."""
    if draft.record.pause and draft.record.phase is Phase.RUN and draft.halted():
        if fuses.spent_up(draft) and draft.seen.spec is not None:
            draft.hold(Hold.SPEND, draft.record.pause, ends=draft.now + draft.seen.spec.hold_days * DAY_S)
        else:
            draft.hold(Hold.PAUSE, draft.record.pause)


_TAKERS: dict[AskKind, Callable[[Draft, Ask], str]] = {
    AskKind.CANCEL: _cancel,
    AskKind.PAUSE: _pause,
    AskKind.RESUME: _resume,
    AskKind.RESIZE: _resize,
    AskKind.MOVE: _move,
    AskKind.SWAP: _swap,
}
