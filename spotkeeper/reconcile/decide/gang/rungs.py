"""A trial of a search: what it reports, how it waits at a rung, and whether it continues. Pure.

A trial that has done its rung's steps saves and ends its processes. Its machines stay until the checkpoint has a copy
in the bucket; then they and the disks are deleted, and the job is on hold (``Hold.RUNG``). Each round of a trial brings
its report in ``sweeps/<name>/state`` up to date, after the record has it, and adds the decisions that follow there
(``contract/sweep.py``). Then each trial's own round continues or ends it.
"""

from __future__ import annotations

from msgspec.structs import replace

from spotkeeper.contract import sweep
from spotkeeper.contract.facts import Kind, Rung
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Hold, Outcome, Phase, TrialProgress
from spotkeeper.contract.sweep import SweepState, Trial, TrialReport
from spotkeeper.reconcile.decide.checkpoint import location
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.job import limits

COPY_S = 900.0  # virtual; a trial's machines wait this long for the copy, then go without it and leave the disks
NEWS = 0.01  # a trial's cost is reported again once it has grown by this share of what the search may cost


def begin(draft: Draft) -> None:
    """Note in the record of which search the job is a trial: an ended job's file is not read any more."""
    spec = draft.snapshot.spec
    if spec is not None and spec.trial is not None and draft.record.trial is None:
        draft.set(trial=TrialProgress(spec.trial, _next(draft, spec.trial, 0)))


def _next(draft: Draft, trial: Trial, rung: int) -> int:
    """Return the rung at which the trial stops next; past the last one if no other trial competes with it any more."""
    return len(trial.rungs) if sweep.alone(draft.snapshot.sweep or SweepState(), trial) else rung


def unlisted(draft: Draft) -> str:
    """Return why a trial gets no machines yet, for users; "" if its search names it, or it has begun.

    ``submit`` names it right after it has made the job. Else anybody's job could report as another person's trial.
    """
    trial, begun = draft.record.trial, draft.record.gen or any(node.cur is not None for node in draft.nodes)
    if trial is None or draft.snapshot.listed or begun:
        return ""
    return (
        f"waiting: search {trial.of.sweep} does not name this job as its trial {trial.of.number}: "
        "if its submission was interrupted, repeat spotkeeper sweep with its file, or cancel the job"
    )


def step(draft: Draft) -> None:
    """Note that the trial has reached its rung; put it on hold once its checkpoint has a copy."""
    trial, record = draft.record.trial, draft.record
    if trial is None or not record.gen or trial.until is None:
        return
    found = _reported(draft)
    if not trial.reached and found is not None and found.step >= trial.until:
        trial = replace(trial, values=(*trial.values, found.value), reached_at=draft.now)
        draft.set(trial=trial)
        worth = f"no value of {trial.of.metric}" if found.value is None else f"{trial.of.metric} {found.value:.6g}"
        draft.log(Event.RUNG, f"r{trial.rung}", detail=f"step {trial.until}: {worth}")
    asked = record.pause and not record.recalled and not limits.spent_up(draft)
    if not trial.reached or asked:  # the rung does not undo a user's pause
        return
    covered, spec = location.covered(draft), draft.snapshot.spec
    copies = spec is not None and spec.checkpoint.mirror is not None
    if covered or not copies or draft.now >= trial.reached_at + COPY_S:
        for index in range(len(draft.nodes)) if covered and not record.keep_disks else ():
            draft.new_disk(index)
        draft.hold(Hold.RUNG, f"at step {trial.until} of search {trial.of.sweep}, until its other trials are there")
    elif found is not None:
        draft.set(reason=f"at step {trial.until} of search {trial.of.sweep}: copying the checkpoint to the bucket")


def _reported(draft: Draft) -> Rung | None:
    """Return what the newest generation's members reported, once they have all stopped by themselves."""
    record, members = draft.record, draft.members()
    if record.stop or not members:
        return None
    if not all(draft.queries.ended(index, slot, record.gen) for index, slot in members):
        return None
    return _value(draft)


def _value(draft: Draft) -> Rung | None:
    """Return the RUNG fact of the lowest member, whose machine has rank 0."""
    for index, slot in draft.members()[:1]:
        facts = draft.queries.said(index, slot, Kind.RUNG, draft.record.gen)
        found = [rung for fact in facts if (rung := Rung.parse(fact.value)) is not None]
        return max(found, key=lambda rung: rung.step, default=None)
    return None


def succeeded(draft: Draft) -> None:
    """Note the metric's last value, before the job ends well."""
    trial, found = draft.record.trial, _value(draft)
    if trial is not None and found is not None:
        draft.set(trial=replace(trial, final=found.value))


def gives_up_disks(draft: Draft) -> bool:
    """Whether the trial waits, and its disks are not needed: their numbers were replaced, and the bucket has a copy."""
    waits = draft.record.phase is Phase.HOLD and draft.record.hold is Hold.RUNG
    return waits and location.covered(draft) and not draft.record.keep_disks


def resume(draft: Draft) -> None:
    """Continue or end a trial that waits at a rung, and end any trial of a search that has spent its money."""
    trial, state, record = draft.record.trial, draft.snapshot.sweep, draft.record
    if trial is None or state is None or record.over or not draft.snapshot.listed:
        return
    of = trial.of
    if of.max_usd is not None and _over_budget(state, trial):
        draft.end(Outcome.STOPPED, f"search {of.sweep} has spent ${state.spent():.2f} of its ${of.max_usd:.2f}")
        return
    found = state.decision(of.first, trial.rung)
    if found is None or record.hold is not Hold.RUNG or not trial.reached:
        return
    step, value = trial.until, trial.values[trial.rung]
    compared = of.number in found.order
    if sweep.continues(state, of, trial.rung, value):
        draft.set(trial=replace(trial, rung=_next(draft, of, trial.rung + 1)))
        best = f"one of the best {found.best} at step {step}"
        late = f"on hold when step {step} was decided, and better than the last of the best {found.best}"
        draft.release("rung", best if compared else late)
    elif not compared:
        late = f"on hold when step {step} was decided, and not better than the last of the best {found.best}"
        draft.end(Outcome.STOPPED, late)
    elif not found.best:
        draft.end(Outcome.STOPPED, f"no trial reported {of.metric} at step {step}")
    else:
        place, count = 1 + found.order.index(of.number), len(found.order)
        why = f"number {place} of {count} at step {step}, and the best {found.best} continue"
        draft.end(Outcome.STOPPED, why)


def _over_budget(state: SweepState, trial: TrialProgress) -> bool:
    return trial.of.max_usd is not None and state.spent() >= trial.of.max_usd


def unreported(draft: Draft) -> bool:
    """Whether the search does not know yet how this trial stands."""
    if draft.record.trial is None or not draft.snapshot.listed:
        return False
    return draft.snapshot.sweep is None or report(draft) is not None


def report(draft: Draft) -> SweepState | None:
    """Return the search's state with this trial's report and what it decides, if either is new; else None."""
    trial, state = draft.record.trial, draft.snapshot.sweep
    if trial is None or state is None or not draft.snapshot.listed:
        return None
    old, record = state.trial(trial.of.number), draft.record
    found = TrialReport(
        number=trial.of.number,
        job=record.job,
        first=trial.of.first,
        values=trial.values,
        final=trial.final,
        over=record.over,
        held=record.hold is not None and not record.hold.passes and record.hold_until is None,
        spent=round(limits.spent(draft), 4),
    )
    new = sweep.joined(old, found)
    same = replace(new, spent=old.spent) == old
    if same and new.spent - old.spent <= (NEWS * trial.of.max_usd / trial.of.parallel if trial.of.max_usd else 1e9):
        made = sweep.decided(state, trial.of)  # the tick reports trials whose record is gone, and decides nothing
        return None if made is state else replace(made, ver=state.ver + 1)
    return sweep.decided(state.told(new), trial.of)


def woken(before: SweepState, after: SweepState, of: Trial) -> frozenset[str]:
    """Return the jobs that may continue or end by this change: by a decision, or since the money is spent."""
    made = [one for one in after.decided if one not in before.decided]
    spent = of.max_usd is not None and before.spent() < of.max_usd <= after.spent()
    open_ = [one for one in after.trials if not one.over]
    return frozenset(
        one.job
        for one in open_
        if spent or any(one.first == known.first and len(one.values) == known.rung + 1 for known in made)
    )


def resting(state: SweepState) -> frozenset[str]:
    """Return the jobs for which, if they wait at a rung, nothing follows yet.

    A trial whose report of the rung was lost is not among them: the rung before is decided.
    """
    made = {(one.first, one.rung) for one in state.decided}
    return frozenset(one.job for one in state.trials if one.values and (one.first, len(one.values) - 1) not in made)
