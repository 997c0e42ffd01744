"""A comparison of shapes for people: the cheapest first, and the soonest first. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from spotkeeper.report.compare import Comparison, Row
from spotkeeper.report.forecast_text import below, hours, span, usd

if TYPE_CHECKING:
    from rich.console import RenderableType

COST, TIME = "cost 80 %", "done 80 %"  # the bands
_COLUMNS = ("shape", "each", "pool", "bought", "step", "network", "cost", COST, "done after", TIME)
_BOUNDS = ("late", "over")  # where the job has a deadline, and a budget
_LEFT = frozenset({"shape", "pool", "bought"})
ELSEWHERE = "a wider terminal and --json have them"


def table(made: Comparison) -> RenderableType:
    """Both orders; the one by cost keeps its cost's band longer on a narrow terminal, the other one its time's."""
    from rich.console import Group
    from rich.text import Text

    told = [*(f"not compared: {line}" for line in made.skipped), *made.assumptions]
    return Group(
        Text(f"{made.job} by cost", "bold"),
        _grid(made.rows, ("each", "network", "step", TIME, "pool", COST)),
        Text(),
        Text(f"{made.job} by time", "bold"),
        _grid(made.by_time(), ("each", "network", "step", COST, "pool", TIME)),
        Text(),
        Text("assumed:", "dim"),
        below(told),
    )


def _grid(rows: Iterable[Row], spare: tuple[str, ...]) -> RenderableType:
    from spotkeeper.report.tables import fitting

    cells = [_cells(row) for row in rows]
    columns = (*_COLUMNS, *(name for name in _BOUNDS if any(cell[name] != "-" for cell in cells)))
    return fitting(cells, columns, spare, set(columns) - _LEFT, ELSEWHERE)


def _cells(row: Row) -> dict[str, str]:
    shape, course = row.shape, row.course
    return {
        "shape": f"{shape.nodes} x {shape.machine_type}",
        "each": str(shape.nproc),
        "pool": row.pool,
        "bought": row.bought,
        "step": f"{row.step_s:.3f} s",
        "network": f"{row.reduce_s / row.step_s if row.step_s else 0.0:.0%}",
        "cost": usd(course.usd.mid),
        COST: span(course.usd, usd),
        "done after": hours(course.finish_h.mid),
        TIME: span(course.finish_h, hours),
        "late": _share(course.late),
        "over": _share(course.over_budget),
    }


def _share(of: float | None) -> str:
    return "-" if of is None else f"{of:.0%}"
