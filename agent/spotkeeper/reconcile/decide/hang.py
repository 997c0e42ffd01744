"""A job that hangs: agents tell of an overdue step, every machine's stacks are had, then it is a crash.

A member says that no step has come for too long; the roll is called for it, and each member has its workers' stacks
written before it answers where they are. So the stop, which ends the processes, comes after all stacks, or after the
time of a roll call. A rank that says it is busy (the script said so, or works outside the loop) clears all. A machine
that does not answer at all is lost, as in any roll call: no crash.
"""

from __future__ import annotations

from dataclasses import dataclass

from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.spec.facts import Kind
from spotkeeper.spec.hang import Answer, Hung, Word
from spotkeeper.spec.record import Roll

_BAD = (Word.ELSEWHERE, Word.SILENT)  # whom others wait for


@dataclass(frozen=True)
class Verdict:
    """The rank that hangs, where one can be told from its victims; ``why``: for people."""

    rank: int | None
    why: str


def told(draft: Draft) -> Hung | None:
    """What a member said of this generation, unless a later step has been told of since."""
    record, progress = draft.record, draft.seen.progress
    beyond = progress.step if progress is not None and progress.gen == record.gen else 0
    found = [
        hung
        for index, slot in draft.members()
        for fact in draft.view.said(index, slot, Kind.HUNG, record.gen)
        if (hung := Hung.parse(fact.value)) is not None and hung.step >= beyond
    ]
    return max(found, key=lambda hung: (hung.step, -hung.since), default=None)


def due(draft: Draft) -> bool:
    """Whether the roll is to be called for it. Who said that it is busy is not asked again at once."""
    return told(draft) is not None and draft.now - draft.record.busy_at > draft.times.silence_s


def judge(draft: Draft, roll: Roll, ended: frozenset[int]) -> Verdict | None:
    """All members of this roll call answered that they are there; ``ended``: of whom nothing runs any more.

    Changes the roll where it was no hang, or is none any more. None: nothing more to do, or to wait for yet.
    """
    hung = told(draft)
    answers = {index: answer for index, _ in draft.members() if (answer := _answer(draft, index, roll)) is not None}
    if hung is None:
        draft.set(roll=None, roll_at=draft.now)
    elif any(answer.word is Word.BUSY for answer in answers.values()):
        draft.set(roll=None, roll_at=draft.now, busy_at=draft.now)
    elif any(index not in answers and index not in ended for index, _ in draft.members()):
        # An agent older than these words never answers: its time is that of the roll call.
        return _verdict(draft, hung, answers) if draft.now > roll.since + draft.times.roll_s else None
    else:
        return _verdict(draft, hung, answers)
    return None


def _answer(draft: Draft, index: int, roll: Roll) -> Answer | None:
    """As to a roll call: of this version or a later one."""
    slot = draft.ranks[index].cur
    if slot is None:
        return None
    found = [Answer.parse(fact.value) for fact in draft.view.said(index, slot, Kind.STACKS, draft.record.gen)]
    return max((one for one in found if one is not None and one.ver >= roll.ver), key=lambda one: one.ver, default=None)


def _verdict(draft: Draft, hung: Hung, answers: dict[int, Answer]) -> Verdict:
    record = draft.record
    since = f"no step after {hung.step} for {max(0.0, draft.now - hung.since):.0f} s"
    bad = sorted(index for index, answer in answers.items() if answer.word in _BAD)
    victims = [index for index, answer in answers.items() if answer.word is Word.WAITS]
    logs = f"Stacks: spotkeeper logs {record.name} --gen {record.gen} --rank "
    if not bad:
        waits = "every rank waits for the others" if len(victims) == len(answers) > 1 else "the job hangs"
        rank = min(answers) if len(answers) == 1 else None
        return Verdict(rank, f"{waits}: {since}. {logs}{'all' if rank is None else rank}")
    who = f"rank {bad[0]} hangs" if len(bad) == 1 else f"ranks {', '.join(map(str, bad[:8]))} hang"
    if len(bad) == 1 and answers[bad[0]].local_rank:
        who = f"local rank {answers[bad[0]].local_rank} of {who}"
    waits = ", and the others wait for it" if len(bad) == 1 and victims else ""
    return Verdict(bad[0], f"{who}: {since}{waits}. {logs}{bad[0] if len(bad) == 1 else 'all'}")
