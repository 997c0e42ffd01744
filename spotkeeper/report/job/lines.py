"""A job as lines of text, for `status`, `watch` and the pages. Without a terminal `watch` prints only these lines."""

from __future__ import annotations

from collections.abc import Iterable

from rich.filesize import decimal

from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Hold, Outcome, Phase
from spotkeeper.report.job.events import EventLine
from spotkeeper.report.job.metrics import MetricView
from spotkeeper.report.job.view import JobView, NodeView, OutputView
from spotkeeper.report.job.waiting import place, trial_lines, waiting_line
from spotkeeper.report.money.money import SETTLED_S, Money
from spotkeeper.report.text.words import count, duration, percent, saved, usd, value_word

# For each kind of hold: what a resume grants, and what a person may want to change in the files before it.
_RESUMES = {
    Hold.FAILURE: (", with a fresh crash budget", "a corrected script, or a corrected job file"),
    Hold.SPEND: (", with max_usd to spend again", "another max_usd, or other files"),
    Hold.MAX_WAIT: (", with max_wait to wait again", "`policy: balanced`, another max_wait, or other pools"),
}


def headline(view: JobView) -> str:
    """The job in one line: ``gpt (k3m9x2ab)  training  generation 4  step 1200/4000  loss 2.1130  512 samples/s``."""
    return f"{title(view)}  {training_line(view)}"


def title(view: JobView) -> str:
    return f"{view.name} ({view.job})  {state_word(view)}"


def training_line(view: JobView) -> str:
    """The job's progress (the last, if it ended): ``generation 4  step 1200/4000 (checkpoint: 1150)  loss 2.1130``."""
    parts = [f"generation {view.gen}"]
    if view.step is not None:
        step = f"step {view.step}" + (f"/{view.total_steps}" if view.total_steps else "")
        saved_at = f" (checkpoint: {view.commit_step})" if view.commit_step is not None and not view.over() else ""
        parts.append(f"last reported: {step}" if _stale(view) else step + saved_at)
    if view.loss is not None:
        parts.append(f"loss {value_word(view.loss)}")
    if view.samples_per_s is not None:
        parts.append(f"{view.samples_per_s:,.0f} samples/s" + (" (real time)" if view.site.scale != 1 else ""))
    if view.uploading_s is not None:
        parts.append("uploading its output to the bucket")
    elif view.no_new_step_s is not None:
        parts.append(f"no new step for {duration(view.no_new_step_s)}")
    return "  ".join(parts)


def on_its_clock(view: JobView) -> str:
    """The words after a duration if the cloud's clock does not run in real time, else ""."""
    return f" on the cloud's clock, {view.site.scale:g}x" if view.site.scale != 1 else ""


def phase_word(view: JobView) -> str:
    """The job's state: starting, training, regrouping, queued (3rd), on hold, or its outcome."""
    if view.outcome is not None:
        return view.outcome.value
    if view.queued():
        return f"queued ({place(view.queue.position)})" if view.queue is not None else "queued"
    if view.phase is Phase.HOLD:
        return "on hold"
    if view.stopping:
        return "regrouping"
    return "training" if view.gen else "starting"


def matches(view: JobView, words: str) -> bool:
    """Whether each word of a search is in the job's name, id, state, owner, zones, pools or models."""
    about = [view.name, view.job, phase_word(view), view.user, view.reason]
    about += [word for node in view.nodes for word in (node.zone, node.pool, node.model.value if node.model else "")]
    text = " ".join(about).lower()
    return all(word in text for word in words.lower().split())


def step_word(view: JobView) -> str:
    """The job's step: ``1200``; ``586+`` if a succeeded job may have made more steps after its last report."""
    if view.step is None:
        return "-"
    return f"{view.step}+" if view.outcome is Outcome.SUCCEEDED and _stale(view) else str(view.step)


def state_word(view: JobView) -> str:
    word = phase_word(view)
    if view.reason.startswith(word):
        return view.reason
    if view.reason and view.queued():
        return f"{word}: {view.reason}"
    return f"{word} ({view.reason})" if view.reason else word


def _stale(view: JobView) -> bool:
    """Whether an ended job may have made more steps than its last report says, since reports come once a minute.

    False if that report is of the last step (``total_steps``).
    """
    return view.over() and view.step is not None and view.step != view.total_steps


def money_line(view: JobView) -> str:
    """The job's cost: ``spent $1.12, the same machine-hours on demand $4.32: 74 % saved``; or why none is.

    Egress between regions follows the amount of which it is a part: ``spent $1.12 ($0.20 of it for egress)``.
    """
    money = view.money
    spent = f"spent {usd(money.spent)}" + (f" ({usd(money.egress)} of it for egress)" if money.egress else "")
    reserved = f"; {reserved_text(money)}" if money.reserved_hours else ""
    if money.saved_percent is None:
        return f"{spent}, {no_saving(view)}{reserved}"
    hours = f"the same machine-hours on demand {usd(money.on_demand_only)}"
    return f"{spent}, {hours}: {saved(money.saved_percent)}{reserved}"


def reserved_text(money: Money) -> str:
    return f"{money.reserved_hours:.1f} machine-hours in reserved capacity, paid for already"


def no_saving(view: JobView) -> str:
    """Why no saving is shown: nothing to compare, or too little training (``saved_percent`` of a job's money)."""
    if not view.money.on_demand_only:
        return "no machine was billed" + ("" if view.over() else " yet")
    if view.over():
        return "nothing was trained, so no saving is estimated"
    if view.hold is not None:
        return f"trained for less than {SETTLED_S / 60:.0f} minutes, so no saving is estimated"
    return "too early to estimate the saving"


def left_line(view: JobView) -> str:
    """The remaining work: ``31 % of the steps, about 12m20s of training left``; "" if the total is unknown."""
    if view.over() or view.step is None or not view.total_steps:
        return ""
    left = f", about {duration(view.left_s)} of training left" if view.left_s is not None else ""
    return f"{percent(share(view))} of the steps" + left + (on_its_clock(view) if left else "")


def image_lines(view: JobView) -> list[str]:
    """How often an image of the state is kept: ``an image every 12 steps costs 0.60 % of the time``; [] if none is."""
    if view.image_steps is None:
        return []
    every = "step" if view.image_steps == 1 else f"{view.image_steps} steps"
    return [f"an image every {every} costs {100 * (view.image_share or 0.0):.2f} % of the time"]


def share(view: JobView) -> float:
    """The share of its steps that a job has done, from 0 to 1."""
    return min(1.0, (view.step or 0) / view.total_steps) if view.total_steps else 0.0


def deadline_lines(view: JobView) -> list[str]:
    """The job's deadline: ``deadline in 2h10m, about 1h20m of training left``; after its end, whether it was met."""
    if (left := view.deadline_in_s) is None:
        return []
    if view.outcome is Outcome.SUCCEEDED:
        return [
            f"done {duration(left)} before its deadline" if left >= 0 else f"done {duration(-left)} after its deadline"
        ]
    word = f"deadline in {duration(left)}" if left >= 0 else f"its deadline was {duration(-left)} ago"
    train = f", about {duration(view.left_s)} of training left" if view.left_s and not view.over() else ""
    return [word + train] if not view.over() or left < 0 else []


def metric_lines(views: Iterable[MetricView]) -> list[str]:
    """One line per metric, with the step of its newest point: ``loss  ▇▆▄▃▂▁  0.2130 at step 354``.

    The points are up to a minute older than the job's step and loss, which the line above them has.
    """
    views = tuple(views)
    width = max((len(view.name) for view in views), default=0)
    told = ((f"{view.name:<{width}}", view.curve, f"{value_word(view.last)} at step {view.step}") for view in views)
    return ["  ".join(filter(None, parts)) for parts in told]


def undisturbed_line(view: JobView) -> str:
    """The cost of a run on uninterrupted on-demand machines, for comparison only."""
    return (
        f"uninterrupted on-demand machines for the same training time: {usd(view.money.undisturbed)}"
        " (the figures above include the time in which machines boot, wait or overlap)"
    )


def preempted(view: JobView) -> str:
    found = view.preemptions
    return count(found.total, "preemption") + (f" ({found.announced} with a notice)" if found.total else "")


def queue_lines(view: JobView) -> list[str]:
    """What a job in the queue waits for, for how long, and when it is expected to start; [] if it does not wait."""
    return [waiting_line(view.queue)] if view.queue is not None and not view.over() else []


def search_lines(view: JobView) -> list[str]:
    """The search of which the job is a trial, and what it waits for there; [] if it is no trial."""
    return [] if view.search is None else trial_lines(view.search)


def hold_lines(view: JobView) -> list[str]:
    """The lines of a job on hold: its cost, when the hold ends by itself, and the commands that end it."""
    hold = view.hold
    if hold is None:
        return []
    lines = []
    if hold.disks:
        price = f"{usd(hold.usd_per_day)} a day" if hold.usd_per_day is not None else "price unknown"
        lines.append(f"its machines are deleted; {count(hold.disks, 'disk')} of {hold.disk_gb} GB in all: {price}")
    if hold.kind is Hold.SPEND:
        lines.append("it can spend a little more than max_usd: costs are checked each minute, and saving takes time")
    if hold.tries_in_s is not None:
        lines.append(f"it tries again by itself in {duration(hold.tries_in_s)}")
    disks = "its disks stay (keep_disks)" if hold.keep_disks else "its disks and their checkpoints are deleted"
    if hold.ends_in_s is not None:
        lines.append(f"unless resumed, it ends in {duration(hold.ends_in_s)}: {disks}")
    if hold.kind is Hold.RUNG:
        return [*lines, f"it goes on or ends by itself; end it ({disks}):  {hold.cancel}"]
    if hold.kind is Hold.QUEUE:
        lines.append(f"it goes on by itself; keep it from that:  spotkeeper pause {view.name}")
        return [*lines, f"end it ({disks}):  {hold.cancel}"]
    if hold.resuming:
        return [*lines, "a resume is requested: the next round starts it"]
    with_what, other = _RESUMES.get(hold.kind, ("", "other files"))
    if not hold.go_back:
        lines.append(f"{_from_where(view)}{with_what}:  {hold.resume}")
    lines.append(f"resume with {other}:  {hold.resume_with}")
    lines.append(f"end it ({disks}):  {hold.cancel}")
    return lines


def _from_where(view: JobView) -> str:
    if view.step is not None and view.commit_step is None:
        return "resume from the start (no checkpoint was reported)"
    at = f" (step {view.commit_step})" if view.commit_step is not None else ""
    return f"resume from the newest checkpoint{at}"


def kept_lines(view: JobView) -> list[str]:
    """The disks of an ended job that are still billed, and how to delete them."""
    if not view.disks_kept:
        return []
    listed = f"gcloud compute disks list --uri --filter=labels.sk-job={view.job}"
    delete = f"gcloud compute disks delete $({listed})"
    end = "spotkeeper local down deletes them and the whole cloud" if view.site.local else f"delete them:  {delete}"
    return [f"{view.disks_kept}  (keep_disks)", end]


def shell_lines(view: JobView) -> list[str]:
    return [event_line(line) for line in view.events if line.event is Event.SHELL]


def event_line(line: EventLine, *, verbose: bool = False) -> str:
    return f"{duration(line.at):>7}  {event_text(line, verbose=verbose)}"


def event_text(line: EventLine, *, verbose: bool) -> str:
    return f"{line.text}; {line.detail}" if verbose and line.detail else line.text


def node_word(node: NodeView) -> str:
    return node.state.value + (f", {duration(node.left_s)} left" if node.left_s is not None else "")


def reasons(nodes: Iterable[NodeView]) -> list[tuple[str, str]]:
    """Why machines were chosen, as pairs: ``nodes 1, 2`` and ``spot in us-central1-a: 23 % of ...``."""
    alike: dict[str, list[int]] = {}
    for node in nodes:
        if node.reason and node.model is not None:
            alike.setdefault(f"{node.model.value} in {node.zone}: {node.reason}", []).append(node.node)
    return [(f"node{'s' * (len(of) > 1)} {', '.join(map(str, of))}", what) for what, of in alike.items()]


def output_line(output: OutputView, name: str) -> str:
    return f"output: {count(output.files, 'file')}, {decimal(output.bytes)}; fetch it: spotkeeper download {name}"
