"""One job on several shapes: how long a step takes on each, and what the job then comes to. Pure.

A step is arithmetic, which all processes share, and the sum of gradients, which none of them can hide from: what was
measured on one shape is taken apart into the two, and put together again for another. A model of a job, not a
benchmark: its assumptions are printed.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from spotkeeper.report.forecast import Course
from spotkeeper.report.machines import ACCELERATORS, INSIDE_GB_S, NETWORK_GBIT_S, NETWORKS, Accelerator
from spotkeeper.spec.stack import PoolState


class Shape(Struct, frozen=True):
    """So many machines of one type, each with so many processes."""

    machine_type: str
    nodes: int
    nproc: int

    @property
    def processes(self) -> int:
        return self.nodes * self.nproc

    @property
    def gbit_s(self) -> float:
        return NETWORKS.get(self.machine_type, NETWORK_GBIT_S)

    @property
    def known(self) -> bool:
        return self.machine_type in NETWORKS

    @property
    def accelerator(self) -> Accelerator | None:
        return ACCELERATORS.get(self.machine_type) or ACCELERATORS.get(family(self.machine_type))

    @property
    def tflops(self) -> float | None:
        """Of one process; None: not known."""
        return self.accelerator.tflops if self.accelerator else None

    @property
    def inside_gb_s(self) -> float:
        return self.accelerator.gb_s if self.accelerator else INSIDE_GB_S


class Step(Struct, frozen=True):
    """One step of the whole global batch, as it was measured. ``gradients_gb``: what all processes sum in it."""

    seconds: float
    shape: Shape
    gradients_gb: float = 0.0


class Row(Struct, frozen=True):
    """A shape with its forecast. ``bought``: ``spot`` (by the job's policy) or ``on-demand``."""

    pool: str
    shape: Shape
    bought: str
    step_s: float
    reduce_s: float  # of it, for gradients
    work_h: float
    course: Course


class Comparison(Struct, frozen=True):
    """Rows by cost, the cheapest first. ``skipped``: shapes that are none for this job, and why."""

    job: str
    rows: tuple[Row, ...]
    skipped: tuple[str, ...]
    assumptions: tuple[str, ...]

    def by_time(self) -> tuple[Row, ...]:
        return tuple(sorted(self.rows, key=lambda row: (row.course.finish_h.mid, row.course.usd.mid)))


def family(machine_type: str) -> str:
    """``a2`` of ``a2-highgpu-1g``, ``p4d`` of ``p4d.24xlarge``."""
    return machine_type.partition("-")[0].partition(".")[0]


def reduce_s(shape: Shape, gradients_gb: float) -> float:
    """Seconds of one all-reduce: a ring inside each machine, and one over the machines.

    A ring of n moves 2 (n - 1) / n of the bytes over each of its links (Patarasu and Yuan, 2009).
    """
    inside = _ring(shape.nproc) * gradients_gb / shape.inside_gb_s
    return inside + _ring(shape.nodes) * gradients_gb * 8.0 / shape.gbit_s


def _ring(members: int) -> float:
    return 2.0 * (members - 1) / members


def step_s(step: Step, shape: Shape) -> float:
    """The measured step on another shape, with the same global batch; on its own shape, as it was measured.

    Accelerators of which both speeds are known differ by their peak; of others nothing is known, so they are alike.
    """
    arithmetic = step.seconds - network_s(step, step.shape)
    ours, theirs = step.shape.tflops, shape.tflops
    faster = theirs / ours if ours and theirs else 1.0
    return arithmetic * step.shape.processes / (shape.processes * faster) + network_s(step, shape)


def network_s(step: Step, shape: Shape) -> float:
    """What gradients take of a step on a shape. Measured steps are as long as their gradients' part at least: where
    they were shorter, the job sums less than is said, or while it reckons, and elsewhere as much less.
    """
    return reduce_s(shape, step.gradients_gb) * _shown(step)


def _shown(step: Step) -> float:
    """The share of its gradients' time that a measured step had room for."""
    reduce = reduce_s(step.shape, step.gradients_gb)
    return min(1.0, step.seconds / reduce) if reduce else 1.0


def shapes(pools: Iterable[PoolState], own: Shape, home: str) -> tuple[list[tuple[str, Shape]], list[str]]:
    """Pools with shapes: the job's own in its ``home`` pool, and of each pool as many machines as make its processes.

    Returns what fits, and a line for each pool that does not.
    """
    fits, out = [(home, own)], []
    for pool in pools:
        shape = Shape(pool.machine_type, -(-own.processes // pool.nproc), pool.nproc)
        if shape.nodes > pool.max_nodes:
            out.append(f"{pool.name}: {shape.nodes} machines are wanted, it has {pool.max_nodes}")
        elif (pool.name, shape) not in fits:
            fits.append((pool.name, shape))
    return fits, out


def _inside(shape: Shape) -> str:
    return f"{shape.machine_type} {shape.inside_gb_s:g} GB/s" + ("" if shape.accelerator else " (an estimate)")


def assumed(step: Step, found: Iterable[Shape]) -> list[str]:
    """What the model of a step takes for granted, a line each."""
    every = [step.shape, *found]
    lines = [
        "step: the global batch stays; arithmetic is shared by all processes, gradients are summed in a ring after it",
        f"gradients: {step.gradients_gb:g} GB a step"
        + ("" if step.gradients_gb else ", so networks make no difference (--gradients-gb: bytes of the parameters)"),
    ]
    if _shown(step) < 1.0:
        lines.append(
            f"gradients: they cannot take {reduce_s(step.shape, step.gradients_gb):.3f} s of a step of "
            f"{step.seconds:.3f} s, so {_shown(step):.0%} of them count everywhere, and nothing else: "
            "there are fewer, or they are summed meanwhile"
        )
    if len({family(shape.machine_type) for shape in every}) > 1:
        lines.append("accelerators: as fast as their peak of dense 16-bit arithmetic; unknown ones are all alike")
    networks = {shape.machine_type: shape.gbit_s for shape in every if shape.known and shape.nodes > 1}
    if networks:
        lines.append("network: " + ", ".join(f"{name} {gbit:g} Gbit/s" for name, gbit in sorted(networks.items())))
    unknown = sorted({shape.machine_type for shape in every if not shape.known and shape.nodes > 1})
    if unknown:
        lines.append(f"network: {NETWORK_GBIT_S:g} Gbit/s of {', '.join(unknown)}, an estimate: not in the table")
    inside = {shape.machine_type: shape for shape in every if shape.nproc > 1}
    if step.gradients_gb and inside:
        lines.append("inside a machine: " + ", ".join(_inside(shape) for _, shape in sorted(inside.items())))
    return lines
