"""A job's place in the queue, and its part in a search: the values that commands and pages show, and their text."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from spotkeeper.contract.job import PRIORITIES
from spotkeeper.contract.sweep import SweepState, Trial, contenders, lacking
from spotkeeper.contract.sweepfile import trial_name
from spotkeeper.report.text.words import count, duration

NAMED = 5  # trials that a line names
TURNS = "it took its machines before: two jobs never take turns"


class WaitingView(Struct, frozen=True):
    """A job that waits for machines. Times are virtual seconds.

    Attributes:
        position: 1 for the job that is served first; 0: machines are reserved for it, and have yet to leave other jobs.
        priority: low, normal or high. ``raised``: how many classes it has gained by waiting.
        machines: how many it needs at least; it takes up to ``max_machines``.
        waited_s: for how long it has waited. ``starts_in_s``: until it is expected to get machines; None: unknown.
        reason: why it waits: ``behind gpt``.
    """

    job: str
    name: str
    position: int
    team: str
    priority: str
    raised: int
    machines: int
    max_machines: int
    waited_s: float
    reason: str
    starts_in_s: float | None = None


class TrialPart(Struct, frozen=True):
    """A job's part in a search.

    Attributes:
        step: at which it waits for other trials of its cohort; None: it does not wait.
        waits_for: names of those that have not reported there yet. ``held``: names of those of them that are on hold
            until a person resumes them. ``trials``: number of those that are to report.
        left_out: whether it is on hold itself, before a rung.
    """

    sweep: str
    number: int
    step: int | None = None
    waits_for: tuple[str, ...] = ()
    trials: int = 0
    held: tuple[str, ...] = ()
    left_out: bool = False


def trial_part(trial: Trial, state: SweepState) -> TrialPart:
    """Return a trial's part in its search, by what all trials have reported."""
    mine = state.trial(trial.number)
    rung = len(mine.values) - 1
    late = lacking(state, trial, rung) if not mine.over and 0 <= rung < len(trial.rungs) else []
    if not late:
        left_out = mine.held and rung + 1 < len(trial.rungs)
        return TrialPart(trial.sweep, trial.number, left_out=left_out)
    names = tuple(trial_name(trial.sweep, report.number) for report in late)
    held = tuple(trial_name(trial.sweep, report.number) for report in late if report.held)
    trials = len(contenders(state, trial, rung) or ())
    return TrialPart(trial.sweep, trial.number, trial.rungs[rung], names, trials, held)


def trial_lines(part: TrialPart) -> list[str]:
    """Name a trial's search, and what the trial waits for."""
    lines = [f"trial {part.number} of a search:  spotkeeper sweep status {part.sweep}"]
    if part.step is not None and part.waits_for:
        late = f"{len(part.waits_for)} of {count(part.trials, 'trial')} {'has' if len(part.waits_for) == 1 else 'have'}"
        lines.append(f"waits at step {part.step}: {late} not reported: {named(part.waits_for)}")
        if part.held:
            lines.append(f"on hold: {named(part.held)}: resume or cancel")
    if part.left_out:
        lines.append("the others do not wait for it; once resumed, it continues if it beats the last one that did")
    return lines


def named(names: Sequence[str]) -> str:
    """Return the first of these names, and how many more there are."""
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def place(position: int) -> str:
    """Format a position in the queue: ``1st``, ``22nd``, ``113th``; ``next`` for 0."""
    if not position:
        return "next"
    last = 0 if position % 100 in (11, 12, 13) else position % 10
    return str(position) + {1: "st", 2: "nd", 3: "rd"}.get(last, "th")


def class_word(priority: str, raised: int) -> str:
    """Format a priority and what the job gained by waiting: ``normal``, ``high (was normal)``."""
    if not raised:
        return priority
    return f"{PRIORITIES[PRIORITIES.index(priority) + raised]} (was {priority})"


def protected_word(why: str, left_s: float | None, whom: str = "it") -> str:
    """Say why a job gives up no machines: ``protected for 12m00s (just started)``.

    Args:
        left_s: for how long; None: to its end, or for :data:`TURNS` from ``whom``.
    """
    span = f"from {whom}" if why == TURNS else "to its end" if left_s is None else f"for {duration(left_s)}"
    return f"protected {span} ({why})"


def machines_word(view: WaitingView) -> str:
    more = f" to {view.max_machines}" if view.max_machines > view.machines else ""
    return f"{view.machines}{more}"


def start_word(seconds: float | None) -> str:
    """Format the expected start: ``in about 2h05m``, ``now``, ``unknown``."""
    if seconds is None:
        return "unknown"
    return f"in about {duration(seconds)}" if seconds >= 1.0 else "now"


def place_line(view: WaitingView) -> str:
    """A job's place and why it waits: ``queued (2nd): behind gpt``."""
    return f"queued ({place(view.position)}): {view.reason}"


def waiting_line(view: WaitingView) -> str:
    """What a job waits for: ``has waited 2h05m for 4 machines (team nlp, priority normal); expected start: ...``."""
    wanted = f"{machines_word(view)} machine{'' if view.max_machines == 1 else 's'}"
    about = f"team {view.team}, priority {class_word(view.priority, view.raised)}"
    reserved = view.starts_in_s is None and not view.position
    start = f"expected start: {'once those machines have left' if reserved else start_word(view.starts_in_s)}"
    return f"has waited {duration(view.waited_s)} for {wanted} ({about}); {start}"
