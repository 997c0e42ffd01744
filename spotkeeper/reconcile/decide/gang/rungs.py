"""A trial of a search: what it reports, how it waits at a rung, and whether it continues. Pure.

A trial that has done its rung's steps saves and ends its processes. Its machines stay until the checkpoint has a copy
in the bucket; then they and the disks are deleted, and the job is on hold (``Hold.RUNG``). Each round of a trial brings
its report in ``sweeps/<name>/state`` up to date, after the record has it. Once all reports of the rung are there, each
trial's own round continues or ends it: ``contract/sweep.py`` says which, the same from every round.
"""

from __future__ import annotations

from msgspec.structs import replace

from spotkeeper.contract import sweep
from spotkeeper.contract.facts import Kind, Rung
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Hold, Outcome, Phase, TrialProgress
from spotkeeper.contract.sweep import SweepState, TrialReport
from spotkeeper.reconcile.decide.checkpoint import location
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.job import limits

COPY_S = 900.0  # virtual; a trial's machines wait this long for the copy, then go without it and leave the disks
NEWS = 0.01  # a trial's cost is reported again once it has grown by this share of what the search may cost


def begin(draft: Draft) -> None:
    """Note in the record of which search the job is a trial: an ended job's file is not read any more."""
    spec = draft.snapshot.spec
    if spec is not None and spec.trial is not None and draft.record.trial is None:
        draft.set(trial=TrialProgress(spec.trial))


def step(draft: Draft) -> None:
    """Note that the trial has reached its rung; put it on hold once its checkpoint has a copy."""
    trial, record = draft.record.trial, draft.record
    if trial is None or not record.gen or trial.until is None:
        return
    found = _reported(draft)
    if not trial.reached and found is not None and found.step >= trial.until:
        trial = replace(trial, values=(*trial.values, found.value), reached_at=draft.now)
        draft.set(trial=trial)
        draft.log(Event.RUNG, f"r{trial.rung}", detail=f"step {trial.until}: {_worth(draft, found.value)}")
    asked = record.pause and not record.recalled and not limits.spent_up(draft)
    if not trial.reached or asked:  # the rung does not undo a user's pause
        return
    covered, spec = location.covered(draft), draft.snapshot.spec
    copies = spec is not None and spec.checkpoint.mirror is not None
    if covered or not copies or draft.now >= trial.reached_at + COPY_S:
        for index in range(len(draft.nodes)) if covered else ():
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
    return draft.record.phase is Phase.HOLD and draft.record.hold is Hold.RUNG and location.covered(draft)


def resume(draft: Draft) -> None:
    """Continue or end a trial that waits at a rung, and end any trial of a search that has spent its money."""
    trial, state, record = draft.record.trial, draft.snapshot.sweep, draft.record
    if trial is None or state is None or record.over:
        return
    of = trial.of
    if of.max_usd is not None and _over_budget(state, trial):
        draft.end(Outcome.STOPPED, f"search {of.sweep} has spent ${state.spent():.2f} of its ${of.max_usd:.2f}")
        return
    best = sweep.continuing(state, of, trial.rung) if record.hold is Hold.RUNG and trial.reached else None
    if best is None:
        return
    if of.number in best:
        draft.set(trial=replace(trial, rung=trial.rung + 1))
        draft.release("rung", f"one of the best {len(best)} at step {trial.until}")
        return
    there = sweep.ranking(state, of, trial.rung) or []
    place = 1 + next((at for at, (number, _) in enumerate(there) if number == of.number), len(there))
    best_of = f"number {place} of {len(there)} at step {trial.until}, and the best {len(best)} continue"
    draft.end(Outcome.STOPPED, best_of if best else f"no trial reported {of.metric} at step {trial.until}")


def waits(state: SweepState, trial: TrialProgress) -> bool:
    """Whether a trial on hold at its rung has reported, and nothing follows from the other trials' reports yet."""
    of, told = trial.of, state.trial(trial.of.number).values == trial.values
    return told and not _over_budget(state, trial) and sweep.continuing(state, of, trial.rung) is None


def _over_budget(state: SweepState, trial: TrialProgress) -> bool:
    return trial.of.max_usd is not None and state.spent() >= trial.of.max_usd


def unreported(draft: Draft) -> bool:
    """Whether the search does not know yet how this trial stands."""
    return draft.record.trial is not None and (draft.snapshot.sweep is None or report(draft) is not None)


def report(draft: Draft) -> SweepState | None:
    """Return the search's state with this trial's report, if that has changed; None if it has not."""
    trial, state = draft.record.trial, draft.snapshot.sweep
    if trial is None or state is None:
        return None
    old, record = state.trial(trial.of.number), draft.record
    found = TrialReport(
        number=trial.of.number,
        job=record.job,
        values=trial.values,
        final=trial.final,
        over=record.over,
        spent=round(limits.spent(draft), 4),
    )
    new = sweep.joined(old, found)
    same = replace(new, spent=old.spent) == old
    if same and new.spent - old.spent <= (NEWS * trial.of.max_usd / trial.of.parallel if trial.of.max_usd else 1e9):
        return None
    return state.told(new)


def woken(state: SweepState, trial: TrialProgress) -> frozenset[str]:
    """Return the jobs that may continue or end, now that all trials of this one's cohort have reported its rung."""
    rung = len(trial.values) - 1
    there = sweep.ranking(state, trial.of, rung) if 0 <= rung < len(trial.of.rungs) else None
    found = (state.trial(number) for number, _ in there or ())
    return frozenset(report.job for report in found if len(report.values) == rung + 1 and not report.over)


def _worth(draft: Draft, value: float | None) -> str:
    metric = draft.record.trial.of.metric if draft.record.trial is not None else ""
    return f"no value of {metric}" if value is None else f"{metric} {value:.6g}"
