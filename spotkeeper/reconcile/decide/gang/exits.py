"""Handles generations that end by themselves: success, failure, hang, roll call, and the crash budget.

Exit 0 from every member of the newest generation is success; exit 93 means "a restart cannot help". Any other code
opens a roll call first. If every member answers, the job itself has crashed. If a machine does not answer, it is lost,
and a loss never consumes the crash budget. A failed job goes on hold and keeps its disks. The package's docstring says
what follows an agent's report of a hang.
"""

from __future__ import annotations

from msgspec.structs import replace

from spotkeeper.contract.facts import HANG, Failure, Hung, Kind, StacksAnswer, WorkerState
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Outcome, Phase, Roll, Slot
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.gang import rungs
from spotkeeper.reconcile.decide.job import limits
from spotkeeper.reconcile.decide.provisioning import machine_health, slots

FATAL = 93  # the exit code for "a restart cannot help"
_BAD = (WorkerState.ELSEWHERE, WorkerState.SILENT)  # answers of processes that block the others


def step(draft: Draft) -> None:
    record = draft.record
    if record.gen == 0 or record.phase is not Phase.RUN:
        return
    codes = _codes(draft)
    if FATAL in codes.values():
        node = min(node for node, code in codes.items() if code == FATAL)
        draft.fail(f"node {node} exited with {FATAL}: a restart cannot help", node)
        return
    members = draft.members()
    if members and len(members) == len(record.members) and all(codes.get(index) == 0 for index, _ in members):
        rungs.succeeded(draft)
        draft.end(Outcome.SUCCEEDED, "all processes exited with 0")
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
    """Return the exit codes of the newest generation, by node. If a node has several, 93 counts, else any but 0."""
    out: dict[int, int] = {}
    for index, slot in draft.members():
        for fact in draft.queries.said(index, slot, Kind.EXIT, draft.record.gen):
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
    """Handle a failed process: open a roll call, or stop the gang if a machine under notice explains the failure."""
    if why := _going(draft):
        draft.halt(draft.now, why)
        return
    node, code = _worst(draft, codes)[0]
    call(draft, "exit", detail=f"node {node} exited with {code}", exits=True)


def _going(draft: Draft) -> str:
    """Return why machines of members are about to go; "" if none is.

    "notice": each of these machines has a notice or a planned end. "loss": the cloud is stopping at least one without.
    """
    queries = draft.queries  # the record may not have the notice yet
    going = [(i, slot) for i, slot in draft.members() if slot.notice is not None or queries.notice(i, slot) is not None]
    warned = all(queries.warned(i, slot) for i, slot in going)
    return ("notice" if warned else "loss") if going else ""


def call(draft: Draft, cause: str, detail: str = "", exits: bool = False) -> None:
    """Open a roll call: every member must answer this version of the document.

    ``exits``: whether a process has ended; if all members then answer, its end counts as a crash.
    """
    draft.set(roll=Roll(ver=draft.before.ver + 1, since=draft.now, cause=cause, exits=exits))
    draft.log(Event.ROLL, f"v{draft.before.ver + 1}", cause=cause, detail=detail)


def answered(draft: Draft, index: int, slot: Slot, roll: Roll) -> bool:
    """Whether a member answered this roll call or a later one. An older answer does not show that its machine works."""
    return any(
        fact.value.isdecimal() and int(fact.value) >= roll.ver for fact in draft.queries.said(index, slot, Kind.HERE)
    )


def _close(draft: Draft, codes: dict[int, int]) -> None:
    roll = draft.record.roll
    assert roll is not None
    missing = [(index, slot) for index, slot in draft.members() if not answered(draft, index, slot, roll)]
    if missing:
        if draft.now > roll.since + draft.times.roll(len(draft.record.members)) and not limits.deaf(
            draft, len(missing)
        ):
            for index, slot in missing:
                if slot.zone in draft.queries.answered:
                    slots.lose(draft, index, "silence")
        return
    if any(draft.queries.gone(index, slot) for index, slot in draft.members()):
        return  # a member answered and was lost afterwards: slots handles the loss
    if roll.exits or any(codes.values()):
        if why := _going(draft):  # a machine that shuts down ends the job's processes first but still answers
            draft.halt(draft.now, why)
        elif again := machine_health.repeated_host_faults(draft):  # hardware faults do not use the crash budget
            for index in again:
                slots.lose(draft, index, machine_health.HOST)
        else:
            bad = _worst(draft, codes)
            why = f"node {bad[0][0]} exited with {bad[0][1]}" if bad else "a node's process ended"
            _crash(draft, bad[0][0] if bad else None, why + machine_health.note_host_faults(draft))
    elif roll.cause == HANG:
        _judge(draft, roll, frozenset(codes))
    else:
        draft.set(roll=None, roll_at=draft.now)


def _crash(draft: Draft, node: int | None, why: str, cause: str = "crash") -> None:
    record = draft.record
    crashes = record.budget.crashes + 1
    draft.set(budget=replace(record.budget, crashes=crashes, crashed_gen=record.gen), roll=None, roll_at=draft.now)
    draft.log(Event.CRASH, f"g{record.gen}", node=node, cause=cause, detail=why)
    allowed = draft.snapshot.spec.retry.crashes if draft.snapshot.spec else 0
    if crashes > allowed:
        draft.fail(f"{why}; the crash budget of {allowed} is used up", node)
        return
    draft.halt(draft.now, "crash")


def _worst(draft: Draft, codes: dict[int, int]) -> list[tuple[int, int]]:
    """Return the failed nodes with their exit codes, the likeliest cause first.

    First come reported failures that did not follow another process's failure, the earliest first. Next come nodes with
    an exit code but no report of a failure (an older agent, or a killed launcher); code 1 is last among them, since a
    process that loses a peer exits with 1. Failures that followed another process's failure are last.
    """

    def order(node: int, code: int) -> tuple[int, int, int, int]:
        failure = _failure(draft, node)
        if failure is None:
            return 1, 0, -code, node
        return 2 if failure.follows else 0, failure.at_ms, -code, node

    return sorted(((node, code) for node, code in codes.items() if code != 0), key=lambda one: order(*one))


def _failure(draft: Draft, node: int) -> Failure | None:
    slot = draft.nodes[node].cur
    facts = draft.queries.said(node, slot, Kind.FAILED, draft.record.gen) if slot is not None else []
    found = [failure for fact in facts if (failure := Failure.parse(fact.value)) is not None]
    return min(found, key=Failure.order, default=None)


def quiet_since(draft: Draft) -> float:
    """Return the time of the gang's last sign of life: a step, the generation's start, or an answered roll call."""
    record, progress = draft.record, draft.snapshot.progress
    at = progress.at if progress is not None and progress.gen == record.gen else 0.0
    return max(record.gen_since, at, record.roll_at)


def _quiet(draft: Draft) -> None:
    record = draft.record
    if len(draft.members()) < len(record.members):
        return
    stalled = any(draft.queries.said(index, slot, Kind.STALL, record.gen) for index, slot in draft.members())
    if hung(draft) is not None and draft.now - record.busy_at > draft.times.silence_s:  # a busy rank is left alone
        call(draft, HANG)
    elif draft.now - quiet_since(draft) > draft.times.silence(len(record.members)):
        call(draft, "silence")
    elif stalled and draft.now - record.roll_at > draft.times.silence_s:
        call(draft, "stall")


# -- hangs


def hung(draft: Draft) -> Hung | None:
    """Return the newest report of a hang in this generation; None if none exists or a later step was reported."""
    record, progress = draft.record, draft.snapshot.progress
    beyond = progress.step if progress is not None and progress.gen == record.gen else 0
    found = [
        one
        for index, slot in draft.members()
        for fact in draft.queries.said(index, slot, Kind.HUNG, record.gen)
        if (one := Hung.parse(fact.value)) is not None and one.step >= beyond
    ]
    return max(found, key=lambda one: (one.step, -one.since), default=None)


def _judge(draft: Draft, roll: Roll, ended: frozenset[int]) -> None:
    """Judge a hang once all members have shown that they are alive (HERE).

    Closes the roll call if the job no longer hangs or a process is busy. Otherwise waits until all members have also
    answered with the states of their workers (STACKS) or the time for it is over, and then counts a crash. ``ended``:
    nodes whose processes ended by themselves.
    """
    reported, members = hung(draft), [index for index, _ in draft.members()]
    answers = {index: answer for index in members if (answer := _answer(draft, index, roll)) is not None}
    if reported is None:
        draft.set(roll=None, roll_at=draft.now)
    elif any(answer.word is WorkerState.BUSY for answer in answers.values()):
        draft.set(roll=None, roll_at=draft.now, busy_at=draft.now)
    elif all(index in answers or index in ended for index in members) or draft.now > roll.since + draft.times.roll(
        len(members)
    ):
        _crash(draft, *_verdict(draft, reported, answers), HANG)  # agents of older versions never answer STACKS


def _answer(draft: Draft, index: int, roll: Roll) -> StacksAnswer | None:
    """Return a member's newest answer STACKS (its workers' state) to this roll call or a later one, or None."""
    slot = draft.nodes[index].cur
    if slot is None:
        return None
    found = [StacksAnswer.parse(fact.value) for fact in draft.queries.said(index, slot, Kind.STACKS, draft.record.gen)]
    return max((one for one in found if one is not None and one.ver >= roll.ver), key=lambda one: one.ver, default=None)


def _verdict(draft: Draft, reported: Hung, answers: dict[int, StacksAnswer]) -> tuple[int | None, str]:
    """Return the node that hangs (None: unclear, since all nodes wait), and the reason as a text."""
    record = draft.record
    since = f"no step after {reported.step} for {max(0.0, draft.now - reported.since):.0f} s"
    bad = sorted(index for index, answer in answers.items() if answer.word in _BAD)
    victims = [index for index, answer in answers.items() if answer.word is WorkerState.WAITS]
    logs = f"Stack traces: spotkeeper logs {record.name} --generation {record.gen}"
    if not bad:
        waits = "every node waits for the others" if len(victims) == len(answers) > 1 else "the job hangs"
        node = min(answers) if len(answers) == 1 else None
        return node, (f"{waits}: {since}. {logs}{'' if node is None else f' --node {node}'}")
    who = f"node {bad[0]} hangs" if len(bad) == 1 else f"nodes {', '.join(map(str, bad[:8]))} hang"
    if len(bad) == 1 and answers[bad[0]].local_rank:
        who = f"local rank {answers[bad[0]].local_rank} of {who}"
    waits = ", and the others wait for it" if len(bad) == 1 and victims else ""
    return bad[0], (f"{who}: {since}{waits}. {logs}{f' --node {bad[0]}' if len(bad) == 1 else ''}")
