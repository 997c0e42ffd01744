"""A job in plain lines, without a terminal: what ``watch`` prints where there is none, and the views are made of."""

from __future__ import annotations

from collections.abc import Iterable

from rich.filesize import decimal

from spotkeeper.report.events import EventLine
from spotkeeper.report.view import JobView, NodeView, OutputView
from spotkeeper.report.words import count, duration, loss_word, saved, usd
from spotkeeper.spec.record import Hold, Outcome, Phase

# What a resume brings, and what a person may want to change first.
_RESUMES = {
    Hold.FAILURE: (", with a fresh crash budget", "a mended script or job file"),
    Hold.SPEND: (", for as much again (max_usd)", "another max_usd, or other files"),
}


def headline(view: JobView) -> str:
    """``storm (k3m9x2ab)  trains  generation 4  step 1200/4000  loss 2.1130  512 samples/s``."""
    return f"{title(view)}  {training_line(view)}"


def title(view: JobView) -> str:
    return f"{view.name} ({view.job})  {state_word(view)}"


def training_line(view: JobView) -> str:
    """``generation 4  step 1200/4000 (checkpoint: 1150)  loss 2.1130``.

    Of a job that is over, what it reported last, and that it did.
    """
    parts = [f"generation {view.gen}"]
    if view.step is not None:
        step = f"step {view.step}" + (f"/{view.total_steps}" if view.total_steps else "")
        saved_at = f" (checkpoint: {view.commit_step})" if view.commit_step is not None and not view.over() else ""
        parts.append(f"last reported: {step}" if _stale(view) else step + saved_at)
    if view.loss is not None:
        parts.append(f"loss {loss_word(view.loss)}")
    if view.samples_per_s is not None:
        parts.append(f"{view.samples_per_s:,.0f} samples/s" + (" (real time)" if view.site.scale != 1 else ""))
    if view.uploading_s is not None:
        parts.append("its output goes to the bucket")
    elif view.no_new_step_s is not None:
        parts.append(f"no new step for {duration(view.no_new_step_s)}")
    return "  ".join(parts)


def on_its_clock(view: JobView) -> str:
    """What is to be known of durations where they are not those of the reader's own clock."""
    return f" on the cloud's clock, {view.site.scale:g}x" if view.site.scale != 1 else ""


def phase_word(view: JobView) -> str:
    """One word."""
    if view.outcome is not None:
        return view.outcome.value
    if view.phase is Phase.HOLD:
        return "holds"
    if view.stopping:
        return "regroups"
    return "trains" if view.gen else "starts"


def step_word(view: JobView) -> str:
    """``1200``; ``586+`` where a job that succeeded reported that step last."""
    if view.step is None:
        return "-"
    return f"{view.step}+" if view.outcome is Outcome.SUCCEEDED and _stale(view) else str(view.step)


def state_word(view: JobView) -> str:
    """One word, and the reason where there is one."""
    word = phase_word(view)
    if view.reason.startswith(word):
        return view.reason
    return f"{word} ({view.reason})" if view.reason else word


def _stale(view: JobView) -> bool:
    """Whether steps may have come after the last report: one comes a minute, and one where the script ends by itself.

    A script may end before its total, so the total says nothing of where a job that succeeded ended.
    """
    return view.over() and view.step is not None and view.step != view.total_steps


def money_line(view: JobView) -> str:
    """``spent $0.1234, the same machine-hours on demand $0.4321: 71 % saved``; before it has trained for a while,
    what was spent.
    """
    money = view.money
    if money.saved_percent is None:
        return f"spent {usd(money.spent)}, too early to say what was saved"
    hours = f"the same machine-hours on demand {usd(money.on_demand_only)}"
    return f"spent {usd(money.spent)}, {hours}: {saved(money.saved_percent)}"


def deadline_lines(view: JobView) -> list[str]:
    """``deadline in 2h10m, some 1h20m of training are left``; of a job that is over, whether it was held."""
    if (left := view.deadline_in_s) is None:
        return []
    if view.outcome is Outcome.SUCCEEDED:
        return [
            f"done {duration(left)} before its deadline" if left >= 0 else f"done {duration(-left)} after its deadline"
        ]
    word = f"deadline in {duration(left)}" if left >= 0 else f"its deadline was {duration(-left)} ago"
    train = f", some {duration(view.left_s)} of training are left" if view.left_s and not view.over() else ""
    return [word + train] if not view.over() or left < 0 else []


def undisturbed_line(view: JobView) -> str:
    """What another run would have cost: it is told, and called nothing that was saved or lost."""
    return (
        f"on-demand machines that nothing interrupts, for as long as it trained: {usd(view.money.undisturbed)}"
        " (the figures above have boots, standstills and machines side by side in them, too)"
    )


def preempted(view: JobView) -> str:
    """``3 preemptions (2 announced)``."""
    told = view.preemptions
    return count(told.total, "preemption") + (f" ({told.announced} announced)" if told.total else "")


def hold_lines(view: JobView) -> list[str]:
    """What a job that holds costs, what comes of it by itself, and the commands that leave the hold."""
    hold = view.hold
    if hold is None:
        return []
    lines = []
    if hold.disks:
        price = f"{usd(hold.usd_per_day)} a day" if hold.usd_per_day is not None else "the stack knows no price"
        lines.append(f"its machines are given back; {count(hold.disks, 'disk')} of {hold.disk_gb} GB in all: {price}")
    if hold.kind is Hold.SPEND:
        lines.append("what it spent above its max_usd: a look is a minute apart, and saving and giving back take time")
    if hold.tries_in_s is not None:
        lines.append(f"it tries again by itself in {duration(hold.tries_in_s)}")
    disks = "its disks stay (keep_disks)" if hold.keep_disks else "its disks and their checkpoints are deleted"
    if hold.ends_in_s is not None:
        lines.append(f"if nobody resumes it, it ends in {duration(hold.ends_in_s)}: {disks}")
    if hold.resuming:
        return [*lines, "asked to resume: the next round does it"]
    with_what, other = _RESUMES.get(hold.kind, ("", "other files"))
    if not hold.go_back:
        lines.append(f"{_from_where(view)}{with_what}:  {hold.resume}")
    lines.append(f"the same with {other}:  {hold.mend}")
    lines.append(f"to end it ({disks}):  {hold.cancel}")
    return lines


def _from_where(view: JobView) -> str:
    if view.step is not None and view.commit_step is None:
        return "to begin anew, for no checkpoint was reported"
    at = f" (step {view.commit_step})" if view.commit_step is not None else ""
    return f"to go on from the newest checkpoint{at}"


def kept_lines(view: JobView) -> list[str]:
    """Which disks of a job that is over still bill, and how to delete them."""
    if not view.disks_kept:
        return []
    listed = f"gcloud compute disks list --uri --filter=labels.sk-job={view.job}"
    delete = f"gcloud compute disks delete $({listed})"
    end = "spotkeeper local down deletes them, with the cloud" if view.site.local else f"to delete them:  {delete}"
    return [f"{view.disks_kept}  (keep_disks)", end]


def event_line(line: EventLine) -> str:
    return f"{duration(line.at):>7}  {line.text}"


def node_word(node: NodeView) -> str:
    return node.state.value + (f", {duration(node.left_s)} left" if node.left_s is not None else "")


def reasons(nodes: Iterable[NodeView]) -> list[tuple[str, str]]:
    """``ranks 1, 2`` and ``spot in us-central1-a: 23% of on-demand, ...``: why each is what it is, a line a choice."""
    ranks: dict[str, list[int]] = {}
    for node in nodes:
        if node.reason and node.model is not None:
            ranks.setdefault(f"{node.model.value} in {node.zone}: {node.reason}", []).append(node.rank)
    return [(f"rank{'s' * (len(of) > 1)} {', '.join(map(str, of))}", what) for what, of in ranks.items()]


def output_line(output: OutputView, name: str) -> str:
    """What the job left, and how to have it."""
    return f"output: {count(output.files, 'file')}, {decimal(output.bytes)}; fetch it: spotkeeper download {name}"
