"""Compares a job on several shapes of machines: the duration of a step on each, and the job's cost. Pure.

A step consists of computation, split among all processes, and the all-reduce of gradients over the network. A step
measured on one shape is divided into these two parts, and each part is scaled to the other shape. This is a model, not
a benchmark, so the assumptions are printed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from msgspec import Struct

from spotkeeper.contract.market import Network
from spotkeeper.contract.stack import PoolState
from spotkeeper.report.forecast.forecast import Outlook, below, hours, span
from spotkeeper.report.forecast.hardware import ACCELERATORS, INSIDE_GB_S, NETWORK_GBIT_S, NETWORKS, Accelerator
from spotkeeper.report.text.words import percent, usd

if TYPE_CHECKING:
    from rich.console import RenderableType


class GangShape(Struct, frozen=True):
    """Machines of one type, each with ``nproc`` processes.

    ``measured_gbit_s``: the network's speed between two machines, as a job measured it; None: not measured.
    """

    machine_type: str
    nodes: int
    nproc: int
    measured_gbit_s: float | None = None

    @property
    def processes(self) -> int:
        return self.nodes * self.nproc

    @property
    def gbit_s(self) -> float:
        return self.measured_gbit_s or NETWORKS.get(self.machine_type, NETWORK_GBIT_S)

    @property
    def known(self) -> bool:
        return self.measured_gbit_s is not None or self.machine_type in NETWORKS

    @property
    def accelerator(self) -> Accelerator | None:
        return ACCELERATORS.get(self.machine_type) or ACCELERATORS.get(family(self.machine_type))

    @property
    def tflops(self) -> float | None:
        """The peak speed of one process's accelerator; None if unknown."""
        return self.accelerator.tflops if self.accelerator else None

    @property
    def inside_gb_s(self) -> float:
        return self.accelerator.gb_s if self.accelerator else INSIDE_GB_S


Networks = Iterable[Network]


def measured(pool: PoolState, networks: Networks) -> float | None:
    """The network speed in Gbit/s that jobs measured on a pool's machine type, in the slowest of the pool's zones.

    None: not measured.
    """
    found = [one.gbit_s for one in networks if one.machine_type == pool.machine_type and one.zone in pool.zones]
    return min(found, default=None)


class MeasuredStep(Struct, frozen=True):
    """One measured step of the global batch. ``gradients_gb``: the size of the gradients that all processes sum."""

    seconds: float
    shape: GangShape
    gradients_gb: float = 0.0


class ForecastRow(Struct, frozen=True):
    """The forecast for one shape. ``bought``: ``spot`` (by the job's policy), ``on-demand`` or ``reserved``."""

    pool: str
    shape: GangShape
    bought: str
    step_s: float
    reduce_s: float  # the seconds of step_s in which gradients are summed
    work_h: float
    outlook: Outlook


class Comparison(Struct, frozen=True):
    """A job's forecasts on several shapes, the cheapest first. ``skipped``: pools that do not fit the job, and why."""

    job: str
    rows: tuple[ForecastRow, ...]
    skipped: tuple[str, ...]
    assumptions: tuple[str, ...]

    def by_time(self) -> tuple[ForecastRow, ...]:
        return tuple(sorted(self.rows, key=lambda row: (row.outlook.finish_h.mid, row.outlook.usd.mid)))


def family(machine_type: str) -> str:
    """The family of a machine type: ``a2`` of ``a2-highgpu-1g``, ``p4d`` of ``p4d.24xlarge``."""
    return machine_type.partition("-")[0].partition(".")[0]


def reduce_s(shape: GangShape, gradients_gb: float) -> float:
    """Seconds of one all-reduce, which uses a ring inside each machine and a ring of all machines.

    A ring of n moves 2 (n - 1) / n of the bytes over each of its links (Patarasu and Yuan, 2009).
    """
    inside = _ring(shape.nproc) * gradients_gb / shape.inside_gb_s
    return inside + _ring(shape.nodes) * gradients_gb * 8.0 / shape.gbit_s


def _ring(members: int) -> float:
    return 2.0 * (members - 1) / members


def step_s(step: MeasuredStep, shape: GangShape) -> float:
    """Seconds that the measured step takes on another shape, with the same global batch.

    The time of the computation is scaled by the accelerators' peak speeds. If a speed is unknown, both
    accelerators count as equal.
    """
    arithmetic = step.seconds - network_s(step, step.shape)
    ours, theirs = step.shape.tflops, shape.tflops
    faster = theirs / ours if ours and theirs else 1.0
    return arithmetic * step.shape.processes / (shape.processes * faster) + network_s(step, shape)


def network_s(step: MeasuredStep, shape: GangShape) -> float:
    """The seconds of a step that the machines of a shape spend on summing gradients.

    For the measured shape, :func:`reduce_s` can estimate more seconds than the whole step took, because the job sums
    fewer gradients than assumed, or sums them while it computes. Then the seconds of every shape are reduced in the
    same ratio, so that those of the measured shape equal the measured step.
    """
    return reduce_s(shape, step.gradients_gb) * _visible(step)


def _visible(step: MeasuredStep) -> float:
    """The share of the time estimated by :func:`reduce_s` that fits into the measured step, from 0 to 1."""
    reduce = reduce_s(step.shape, step.gradients_gb)
    return min(1.0, step.seconds / reduce) if reduce else 1.0


def shapes(
    pools: Iterable[PoolState], own: GangShape, home: str, networks: Networks
) -> tuple[list[tuple[str, GangShape]], list[str]]:
    """Choose the shapes to compare.

    They are the job's ``own`` shape in its pool ``home``, and in each pool the fewest machines that together run at
    least as many processes as ``own``.

    Returns pairs of a pool's name and a shape, and a line for each pool that has too few machines.
    """
    fits, out = [(home, own)], []
    for pool in pools:
        nodes = -(-own.processes // pool.nproc)
        shape = GangShape(pool.machine_type, nodes, pool.nproc, measured(pool, networks))
        if shape.nodes > pool.max_machines:
            out.append(f"{pool.name}: the job needs {shape.nodes} machines, and the pool has {pool.max_machines}")
        elif (pool.name, shape) not in fits:
            fits.append((pool.name, shape))
    return fits, out


def _network(shape: GangShape) -> str:
    how = " (measured by a job)" if shape.measured_gbit_s else ""
    return f"{shape.machine_type} {shape.gbit_s:.4g} Gbit/s{how}"


def _inside(shape: GangShape) -> str:
    return f"{shape.machine_type} {shape.inside_gb_s:g} GB/s" + ("" if shape.accelerator else " (an estimate)")


def assumed(step: MeasuredStep, found: Iterable[GangShape]) -> list[str]:
    """The assumptions about a step, a line each."""
    every = [step.shape, *found]
    lines = [
        "step: the global batch is the same; all processes share the computation, then sum the gradients in a ring",
        f"gradients: {step.gradients_gb:g} GB a step"
        + ("" if step.gradients_gb else ", so networks make no difference (--gradients-gb sets the gradients' size)"),
    ]
    if _visible(step) < 1.0:
        lines.append(
            f"gradients: by this estimate their sum takes {reduce_s(step.shape, step.gradients_gb):.3f} s, but a whole "
            f"step takes {step.seconds:.3f} s; so only {percent(_visible(step))} of the estimated time is counted on "
            "every shape (perhaps the job has fewer gradients, or sums them while it computes)"
        )
    if len({family(shape.machine_type) for shape in every}) > 1:
        lines.append("accelerators: as fast as their peak of dense 16-bit arithmetic; unknown speeds count as equal")
    networks = {shape.machine_type: shape for shape in every if shape.known and shape.nodes > 1}
    if networks:
        lines.append("network: " + ", ".join(_network(shape) for _, shape in sorted(networks.items())))
    unknown = sorted({shape.machine_type for shape in every if not shape.known and shape.nodes > 1})
    if unknown:
        lines.append("network: " + ", ".join(f"{name} {NETWORK_GBIT_S:g} Gbit/s (an estimate)" for name in unknown))
    inside = {shape.machine_type: shape for shape in every if shape.nproc > 1}
    if step.gradients_gb and inside:
        lines.append("inside a machine: " + ", ".join(_inside(shape) for _, shape in sorted(inside.items())))
    return lines


# -- for people

COST, TIME = "cost 80 %", "done 80 %"  # titles of the columns with 80 % ranges
_COLUMNS = ("shape", "each", "pool", "bought", "step", "network", "cost", COST, "done after", TIME)
_BOUNDS = ("late", "over")  # columns of a job with a deadline, and of one with a budget
_LEFT = frozenset({"shape", "pool", "bought"})
ELSEWHERE = "a wider terminal and --json show them"


def table(made: Comparison) -> RenderableType:
    """Return the forecasts twice: in a table sorted by cost, and in a table sorted by time.

    A narrow terminal drops columns of a table; the column by which the table is sorted goes last.
    """
    from rich.console import Group
    from rich.text import Text

    lines = [*(f"not compared: {line}" for line in made.skipped), *made.assumptions]
    return Group(
        Text(f"{made.job} by cost", "bold"),
        _grid(made.rows, ("each", "network", "step", TIME, "pool", COST)),
        Text(),
        Text(f"{made.job} by time", "bold"),
        _grid(made.by_time(), ("each", "network", "step", COST, "pool", TIME)),
        Text(),
        Text("assumed:", "dim"),
        below(lines),
    )


def _grid(rows: Iterable[ForecastRow], spare: tuple[str, ...]) -> RenderableType:
    from spotkeeper.report.text.render import fitting

    cells = [_cells(row) for row in rows]
    columns = (*_COLUMNS, *(name for name in _BOUNDS if any(cell[name] != "-" for cell in cells)))
    return fitting(cells, spare, set(columns) - _LEFT, ELSEWHERE, columns)


def _cells(row: ForecastRow) -> dict[str, str]:
    shape, outlook = row.shape, row.outlook
    return {
        "shape": f"{shape.nodes} x {shape.machine_type}",
        "each": str(shape.nproc),
        "pool": row.pool,
        "bought": row.bought,
        "step": f"{row.step_s:.3f} s",
        "network": percent(row.reduce_s / row.step_s if row.step_s else 0.0),
        "cost": usd(outlook.usd.mid),
        COST: span(outlook.usd, usd),
        "done after": hours(outlook.finish_h.mid),
        TIME: span(outlook.finish_h, hours),
        "late": _share(outlook.late),
        "over": _share(outlook.over_budget),
    }


def _share(of: float | None) -> str:
    return "-" if of is None else percent(of)
