"""A search as text: its plan, and its trials."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.text import Text

from spotkeeper.contract.sweep import Params
from spotkeeper.contract.sweepfile import Value, text
from spotkeeper.report.sweep import PlanView
from spotkeeper.report.text.render import fitting
from spotkeeper.report.text.words import count, percent, usd

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
