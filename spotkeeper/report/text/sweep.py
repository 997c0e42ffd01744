"""A search as text: its plan, and its trials."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable
from datetime import datetime, timezone

from rich.console import Group, RenderableType
from rich.text import Text

from spotkeeper.contract.record import Hold
from spotkeeper.contract.sweep import Params
from spotkeeper.contract.sweepfile import SweepStop, Value, text
from spotkeeper.report.job.lines import phase_word
from spotkeeper.report.job.view import JobView
from spotkeeper.report.job.waiting import named
from spotkeeper.report.money.account_text import safe_cell
from spotkeeper.report.sweep import WAITS, PlanView, RungView, SweepView, TrialView
from spotkeeper.report.text.render import fitting
from spotkeeper.report.text.words import count, percent, usd, value_word

SHOWN = 20  # trials of a plan, unless JSON is wanted


def param_word(value: Value | None) -> str:
    """Format a parameter's value: numbers with four significant digits; ``-`` for a parameter that does not apply."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else text(value)


def param_rows(values: Iterable[Params]) -> list[dict[str, str]]:
    """Return a row for each trial, with a column for each parameter that any of them has."""
    every = list(values)
    names = list(dict.fromkeys(name for params in every for name in params))
    return [{name: param_word(params.get(name)) for name in names} for params in every]


def plan(view: PlanView) -> RenderableType:
    """The first trials' values, then what the search will do and cost."""
    rows = param_rows(view.values[:SHOWN])
    numbered = [{"trial": str(at), **row} for at, row in enumerate(rows)]
    parts: list[RenderableType] = [fitting(numbered, (), {"trial"}, "--json")]
    if (more := view.trials - len(rows)) > 0:
        parts.append(Text(f"and {count(more, 'more trial')} (--json lists all)", style="dim"))
    parts += [Text(), *map(Text, plan_lines(view))]
    return Group(*parts)


def plan_lines(view: PlanView) -> list[str]:
    seed = "" if view.sampler == "grid" else f", seed {view.seed}"
    best = "smallest" if view.goal == "min" else "largest"
    lines = [
        f"{view.name}: {count(view.trials, 'trial')} ({view.sampler}{seed}), at most {view.parallel} at a time, "
        f"for the {best} {view.metric}",
    ]
    lines += [f"step {rung.step}: {rung.continuing} of {rung.trials} continue" for rung in view.rungs]
    if view.rungs:
        lines.append(f"{percent(view.steps_share)} of the steps that all trials to their ends would take")
    return [*lines, cost_line(view)]


def cost_line(view: PlanView) -> str:
    """What the search may cost, and by which rule."""
    limit = "" if view.max_usd is None else f"; it stops at {usd(view.max_usd)} (`max_usd`)"
    if view.at_most_usd is None:
        bound = "cost: unknown, since the job file has no `work` (such as 2h)" if view.max_usd is None else "cost:"
        return f"{bound} at most {usd(view.max_usd)} (`max_usd`)" if view.max_usd is not None else bound
    all_of_them = "" if not view.rungs else f", and {usd(view.whole_usd or 0.0)} for all trials to their ends"
    return f"cost: at most {usd(view.at_most_usd)} at the highest on-demand price{all_of_them}{limit}"


# -- trials

COLUMNS = ("place", "trial", "job", "state", "rung", "step", "value", "spent", "on_demand_only", "curve")
NUMBERS = frozenset({"place", "step", "value", "spent"})


def column(name: str) -> str:
    """Return the title of a parameter's column, which differs from those of the others."""
    return f"{name} (param)" if name in COLUMNS else name


def trial_row(view: TrialView, names: Iterable[str]) -> dict[str, str]:
    """Return a trial's cells by title; ``names``: of the parameters."""
    return {
        "place": "-" if view.place is None else str(view.place),
        "trial": view.name,
        **{column(name): param_word(view.params.get(name)) for name in names},
        "state": view.state,
        "step": "-" if view.step is None else str(view.step),
        "value": "-" if view.value is None else value_word(view.value),
        "spent": usd(view.spent),
    }


def param_names(view: SweepView) -> list[str]:
    """Return the names of all parameters that a trial has, in the order of the search's file as far as it is known."""
    return list(dict.fromkeys(name for row in sorted(view.rows, key=lambda row: row.number) for name in row.params))


def status(view: SweepView, most: int | None = SHOWN) -> RenderableType:
    """The totals of a search, and its best trials; ``most``: how many, None: all."""
    names = param_names(view)
    rows = [{**trial_row(row, names), "curve": row.curve} for row in view.rows[:most]]
    titles = [column(name) for name in names]
    spare = ("curve", "step", "spent", *titles[2:])
    parts: list[RenderableType] = [Text(line, style="bold" if not at else "") for at, line in enumerate(lines(view))]
    parts += [Text(), fitting(rows, spare, NUMBERS | set(titles), f"spotkeeper sweep status {view.name} --csv")]
    if (more := view.trials - len(rows)) > 0:
        parts.append(Text(f"and {count(more, 'more trial')}: spotkeeper sweep status {view.name} --all", style="dim"))
    return Group(*parts)


def lines(view: SweepView) -> list[str]:
    """The search in a few lines: states, comparisons, the best trial, money."""
    states = ", ".join(f"{number} {state}" for state, number in sorted(view.states.items()))
    found = [f"{view.name}: {count(view.trials, 'trial')}: {states}"]
    for rung in view.rungs:
        where = rung_word(view, rung)
        found += [f"{where}: {reached_word(view, rung)}", *rung_lines(rung, where)]
    best_row = next((row for row in view.rows if row.number == view.best), None)
    if best_row is not None and best_row.value is not None:
        values = ", ".join(f"{name} {param_word(value)}" for name, value in best_row.params.items())
        found.append(f"best: {best_row.name} ({view.metric} {value_word(best_row.value)}): {values}")
    found.append(money_line(view))
    found += stop_lines(view)
    if view.missing:
        found.append(f"{count(view.missing, 'trial')} not submitted: repeat the command that starts or extends it")
    return found


def rung_word(view: SweepView, rung: RungView) -> str:
    """Name a comparison: ``step 10``, ``trials 9 to 28, step 10`` if the search was extended."""
    if all(other.first == rung.first for other in view.rungs):
        return f"step {rung.step}"
    alone = rung.first == rung.last
    return f"{f'trial {rung.first}' if alone else f'trials {rung.first} to {rung.last}'}, step {rung.step}"


def reached_word(view: SweepView, rung: RungView) -> str:
    """How many trials have reported a rung, and how many more never will."""
    if not rung.trials:
        return "no trial continues to it"
    lost = f", {rung.lost} will not" if rung.lost else ""
    best = "" if rung.best is None else f", best {view.metric} {value_word(rung.best)}"
    return f"{rung.reached} of {rung.trials} have reported{lost}{best}"


def rung_lines(rung: RungView, where: str) -> list[str]:
    """For which trials others wait at a rung, and what to do. ``where``: the rung's name (:func:`rung_word`)."""
    found = [f"{where} waits for {named(rung.waits_for)}"] if rung.waits_for else []
    if rung.held and rung.waits_for:
        found.append(f"{where} does not wait for {named(rung.held)}, on hold: resume in time, or cancel")
    elif rung.held:
        few = "on hold, since too few others have a value: resume or cancel"
        found.append(f"{where} waits for {named(rung.held)}, {few}")
    return found


def stop_lines(view: SweepView) -> list[str]:
    """Who stopped the search, and how it goes on."""
    found = []
    for stop in view.stops:
        found.append(f"{stopped(stop)}: cancelled those of the first {count(stop.below, 'trial')} that had not ended")
    if view.stops and view.stops[-1].below == view.trials:
        found.append(f"further trials: spotkeeper sweep extend {view.name} --trials +20")
    return found


def stopped(stop: SweepStop) -> str:
    """Who stopped a search, and when: ``stopped by ann at 2026-07-01 12:00 UTC``."""
    at = datetime.fromtimestamp(stop.at, timezone.utc)
    return f"stopped{f' by {stop.by}' if stop.by else ''} at {at:%Y-%m-%d %H:%M} UTC"


def search_line(name: str, views: Iterable[JobView]) -> str:
    """The trials of a search in the list of jobs: their number by state, and what they have cost."""
    found = list(views)
    states = Counter(_state(view) for view in found)
    words = ", ".join(f"{number} {state}" for state, number in sorted(states.items()))
    spent = usd(sum(view.money.spent for view in found))
    return f"search {name}: {count(len(found), 'trial')} ({words}), spent {spent}: spotkeeper sweep status {name}"


def _state(view: JobView) -> str:
    if view.hold is not None and view.hold.kind is Hold.RUNG:
        return WAITS
    return phase_word(view).partition(" (")[0]


def money_line(view: SweepView) -> str:
    limit = "" if view.max_usd is None else f" of {usd(view.max_usd)}"
    text = f"spent: {usd(view.spent)}{limit}, on-demand the same machines would cost {usd(view.on_demand_only)}"
    if view.whole_saved is None:
        return text
    return f"{text}; by halving it saves about {usd(view.whole_saved)} (the stopped trials to their ends)"


def trials_csv(view: SweepView) -> str:
    """All trials as CSV, the best first."""
    out, names = io.StringIO(), param_names(view)
    writer = csv.writer(out, lineterminator="\n")
    columns = COLUMNS[:-1]
    writer.writerow(map(safe_cell, (*columns[:3], *map(column, names), *columns[3:])))
    for row in view.rows:
        cells: dict[str, object] = {name: getattr(row, name) for name in columns if name != "trial"}
        cells |= {"trial": row.name, "spent": round(row.spent, 4), "on_demand_only": round(row.on_demand_only, 4)}
        values = [text(row.params[name]) if name in row.params else "" for name in names]
        line = (*(cells[name] for name in columns[:3]), *values, *(cells[name] for name in columns[3:]))
        writer.writerow(map(safe_cell, line))
    return out.getvalue().rstrip("\n")
