"""A search as tables and figures of its page."""

from __future__ import annotations

from collections.abc import Iterable

from spotkeeper.report.html.markup import Child, Markup, el, fact, join, table
from spotkeeper.report.sweep import RungView, SweepView
from spotkeeper.report.text.sweep import (
    NUMBERS,
    column,
    param_names,
    param_word,
    rung_lines,
    rung_word,
    stop_lines,
    trial_row,
)
from spotkeeper.report.text.words import count, usd, value_word


def links(names: Iterable[str]) -> Markup | None:
    """Return links to the pages of searches; None without any."""
    found = [el("a", name, href=f"/sweeps/{name}") for name in names]
    return join([el("span", "Searches: ", class_="dim"), join(found, ", ")]) if found else None


def figures(view: SweepView) -> Markup:
    best = next((row for row in view.rows if row.number == view.best), None)
    states = ", ".join(f"{number} {state}" for state, number in sorted(view.states.items()))
    facts = [
        fact("Trials", str(view.trials), states),
        fact(
            f"Best {view.metric}", "-" if best is None else value_word(best.value), None if best is None else best.name
        ),
        fact("Spent", usd(view.spent), None if view.max_usd is None else f"of {usd(view.max_usd)}"),
        fact("On demand", usd(view.on_demand_only), "the same machine-hours"),
    ]
    if view.whole_saved is not None:
        facts.append(fact("Saved by halving", usd(view.whole_saved), "estimated: stopped trials to their ends"))
    return el("div", *facts, class_="facts")


def best_values(view: SweepView) -> Markup | None:
    """Return the parameters of the best trial in a line; None without one."""
    best = next((row for row in view.rows if row.number == view.best), None)
    if best is None:
        return None
    values = ", ".join(f"{name} {param_word(value)}" for name, value in best.params.items())
    return el("p", f"Best: {best.name}: {values}")


def stops(view: SweepView) -> Markup | None:
    """Return who stopped the search; None if nobody did."""
    return join([el("p", line) for line in stop_lines(view)]) if view.stops else None


def rungs(view: SweepView) -> Markup | None:
    """Return the comparisons of a search that halves; None of another."""
    rows = [_rung(view, rung) for rung in view.rungs]
    head = ("Comparison", "Reported", "Will not", "Trials", f"Best {view.metric}")
    if not rows:
        return None
    waits = [
        el("p", line, class_="dim small") for rung in view.rungs for line in rung_lines(rung, rung_word(view, rung))
    ]
    return join([table(head, rows, "Comparisons", (1, 2, 3, 4)), *waits])


def _rung(view: SweepView, rung: RungView) -> tuple[str, ...]:
    best = "-" if rung.best is None else value_word(rung.best)
    return rung_word(view, rung), str(rung.reached), str(rung.lost), str(rung.trials), best


def trials(view: SweepView, first: int, most: int) -> Markup:
    """Return the table of ``most`` trials from the one at ``first``, the best first."""
    names = param_names(view)
    rows: list[dict[str, Child]] = []
    for row in view.rows[first : first + most]:
        cells: dict[str, Child] = dict(trial_row(row, names))
        rows.append({**cells, "trial": el("a", row.name, href=f"/jobs/{row.job}") if row.job else row.name})
    head = list(rows[0]) if rows else []
    titles = {column(name) for name in names}
    right = [at for at, word in enumerate(head) if word in NUMBERS or word in titles]
    shown = [word if word in titles else word.capitalize() for word in head]
    body = table(shown, [list(row.values()) for row in rows], "Trials", right, "No trial.")
    return join(
        [body, el("p", f"{first + 1} to {first + len(rows)} of {count(view.trials, 'trial')}", class_="dim small")]
    )
