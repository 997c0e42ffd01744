"""The queue as tables: rows for `spotkeeper queue` and for the dashboard, and the tables of the former."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from spotkeeper.report.job.waiting import WaitingView, class_word, machines_word, place, protected_word
from spotkeeper.report.queue import QueueView, ReservedView, TeamView
from spotkeeper.report.text.render import fitting
from spotkeeper.report.text.words import count, duration, usd

NUMBERS = frozenset({"machines", "waits", "starts in", "ends in", "share", "entitled", "waiting", "used", "this month"})
NOBODY_WAITS = "no job waits"
_MORE = "spotkeeper queue --json"


def waiting_row(view: WaitingView) -> dict[str, str]:
    return {
        "place": place(view.position),
        "job": view.name,
        "team": view.team,
        "priority": class_word(view.priority, view.raised),
        "machines": machines_word(view),
        "waits": duration(view.waited_s),
        "starts in": duration(view.starts_in_s),
        "why": view.reason,
    }


def running_row(view: ReservedView) -> dict[str, str]:
    return {
        "job": view.name,
        "team": view.team,
        "priority": class_word(view.priority, view.raised),
        "machines": str(view.machines),
        "ends in": duration(view.ends_in_s),
        "notes": "; ".join(_notes(view)) or "-",
    }


def _notes(view: ReservedView) -> list[str]:
    notes = []
    if (leave := view.granted - view.machines) > 0:
        notes.append(f"{leave} more {'leaves' if leave == 1 else 'leave'}" + (f" for {view.whom}" if view.whom else ""))
    elif leave < 0:
        notes.append(f"{-leave} still to come")
    if view.gap:
        notes.append(f"in the gap of {view.gap}")
    if view.borrows_from:
        notes.append(f"team borrows from {', '.join(view.borrows_from)}")
    if view.spared_for:
        notes.append(protected_word(view.protected, view.protected_s, view.spared_for))
    if view.recalls:
        notes.append(f"{count(view.recalls, 'recall')} within a day")
    return notes


def team_row(view: TeamView) -> dict[str, str]:
    return {
        "team": view.name,
        "share": f"{view.share:g}",
        "machines": str(view.machines),
        "entitled": f"{round(view.entitled, 1):g}",
        "waiting": str(view.waiting),
        "used": usd(view.use_usd),
        "this month": usd(view.month_usd),
        "limits": ", ".join(_limits(view)) or "-",
        "borrows from": ", ".join(view.borrows_from) or "-",
    }


def _limits(view: TeamView) -> list[str]:
    limits = [] if view.max_machines is None else [count(view.max_machines, "machine")]
    limits += [] if view.max_usd_hour is None else [f"{usd(view.max_usd_hour)}/h"]
    return limits + ([] if view.max_usd_month is None else [f"{usd(view.max_usd_month)} a month"])


def left_out(view: QueueView) -> str:
    """How many jobs the view leaves out; "" if it has all."""
    waiting, running = view.all_waiting - len(view.waiting), view.all_running - len(view.running)
    parts = [f"{waiting} more wait"] * bool(waiting) + [f"{running} more run"] * bool(running)
    return ", ".join(parts)


def queue(view: QueueView) -> RenderableType:
    """Three tables: jobs that wait, jobs that have machines, teams."""
    waiting, running = [*map(waiting_row, view.waiting)], [*map(running_row, view.running)]
    teams = [*map(team_row, view.teams)]
    parts: list[RenderableType] = [Text(f"waiting: {view.all_waiting}", style="bold") if waiting else NOBODY_WAITS]
    parts += (
        [fitting(waiting, ("priority", "team", "waits", "starts in"), NUMBERS, _MORE, wrapped="why")] if waiting else []
    )
    if running:
        used = sum(team.machines for team in view.teams)
        parts += [Text(), Text(f"running: {view.all_running}, on {used} of {view.machines} machines", style="bold")]
        parts.append(fitting(running, ("priority", "team", "ends in"), NUMBERS, _MORE, wrapped="notes"))
    parts += [Text(), Text("teams", style="bold"), fitting(teams, ("limits", "share", "used"), NUMBERS, _MORE)]
    if more := left_out(view):
        parts.append(Text(f"{more}: spotkeeper queue --all", style="dim"))
    return Group(*parts)
