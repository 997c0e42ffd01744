"""One job on several shapes: how long a step takes on each, and what the job then comes to. Pure.

A step is arithmetic, which all processes share, and the sum of gradients, which none of them can hide from: what was
measured on one shape is taken apart into the two, and put together again for another. A model of a job, not a
benchmark: its assumptions are printed.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from spotkeeper.report.forecast import Course
from spotkeeper.spec.stack import PoolState

# Peak dense BF16 TFLOPS of one accelerator (fp16 where it has no BF16), and GB/s from one to the next in a machine, one
# way: NVIDIA's data sheets (half of what they tell with sparsity, and half of NVLink's two ways). V100: the four links
# that lie within four of them. N1 tells no accelerator: a T4. By the family that a machine type's name begins with.
_SPEEDS = {
    "a2": (312.0, 300.0), "a3": (989.0, 450.0), "g2": (121.0, 12.0), "n1": (65.0, 12.0),
    "g4dn": (65.0, 12.0), "g5": (70.0, 12.0), "g6": (121.0, 12.0), "g6e": (362.0, 24.0),
    "p3": (125.0, 100.0), "p3dn": (125.0, 100.0), "p4d": (312.0, 300.0), "p4de": (312.0, 300.0),
    "p5": (989.0, 450.0), "p5e": (989.0, 450.0), "p5en": (989.0, 450.0),
}  # fmt: skip
# Gbit/s from one machine to another that last: Compute Engine's "Maximum network bandwidth" without paid tiers
# (docs.cloud.google.com/compute/docs/gpus and .../gpus/gpu-network-bandwidth; N1 by its vCPUs); EC2's baseline, not the
# burst (``DescribeInstanceTypes``: NetworkInfo, with EFA the sum over all cards; P3 as its page has it).
_GBIT_S = {
    "a2-highgpu-1g": 24.0, "a2-highgpu-2g": 32.0, "a2-highgpu-4g": 50.0, "a2-highgpu-8g": 100.0,
    "a2-megagpu-16g": 100.0, "a2-ultragpu-1g": 24.0, "a2-ultragpu-2g": 32.0, "a2-ultragpu-4g": 50.0,
    "a2-ultragpu-8g": 100.0, "a3-highgpu-1g": 25.0, "a3-highgpu-2g": 50.0, "a3-highgpu-4g": 100.0,
    "a3-highgpu-8g": 1000.0, "a3-megagpu-8g": 1800.0, "a3-ultragpu-8g": 3600.0,
    "g2-standard-4": 10.0, "g2-standard-8": 16.0, "g2-standard-12": 16.0, "g2-standard-16": 32.0,
    "g2-standard-24": 32.0, "g2-standard-32": 32.0, "g2-standard-48": 50.0, "g2-standard-96": 100.0,
    "n1-standard-8": 16.0, "n1-standard-16": 32.0,
    "g4dn.xlarge": 5.0, "g4dn.2xlarge": 10.0, "g4dn.4xlarge": 20.0, "g4dn.8xlarge": 50.0, "g4dn.12xlarge": 50.0,
    "g4dn.16xlarge": 50.0, "g4dn.metal": 100.0,
    "g5.xlarge": 2.5, "g5.2xlarge": 5.0, "g5.4xlarge": 10.0, "g5.8xlarge": 25.0, "g5.12xlarge": 40.0,
    "g5.16xlarge": 25.0, "g5.24xlarge": 50.0, "g5.48xlarge": 100.0,
    "g6.xlarge": 2.5, "g6.2xlarge": 5.0, "g6.4xlarge": 10.0, "g6.8xlarge": 25.0, "g6.12xlarge": 40.0,
    "g6.16xlarge": 25.0, "g6.24xlarge": 50.0, "g6.48xlarge": 100.0,
    "g6e.xlarge": 2.5, "g6e.2xlarge": 5.0, "g6e.4xlarge": 20.0, "g6e.8xlarge": 25.0, "g6e.12xlarge": 100.0,
    "g6e.16xlarge": 35.0, "g6e.24xlarge": 200.0, "g6e.48xlarge": 400.0,
    "p3.2xlarge": 2.5, "p3.8xlarge": 10.0, "p3.16xlarge": 25.0, "p3dn.24xlarge": 100.0,
    "p4d.24xlarge": 400.0, "p4de.24xlarge": 400.0,
    "p5.48xlarge": 3200.0, "p5e.48xlarge": 3200.0, "p5en.48xlarge": 3200.0,
}  # fmt: skip
GBIT_S = 10.0  # of a machine type that is not in the table
INSIDE_GB_S = 12.0


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
        return _GBIT_S.get(self.machine_type, GBIT_S)

    @property
    def known(self) -> bool:
        return self.machine_type in _GBIT_S

    @property
    def tflops(self) -> float | None:
        """Of one process; None: not known."""
        speeds = _SPEEDS.get(family(self.machine_type))
        return speeds[0] if speeds else None

    @property
    def inside_gb_s(self) -> float:
        speeds = _SPEEDS.get(family(self.machine_type))
        return speeds[1] if speeds else INSIDE_GB_S


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
    """The measured step on another shape, with the same global batch.

    Accelerators of which both speeds are known differ by their peak; of others nothing is known, so they are alike.
    """
    arithmetic = max(0.0, step.seconds - reduce_s(step.shape, step.gradients_gb))
    ours, theirs = step.shape.tflops, shape.tflops
    faster = theirs / ours if ours and theirs else 1.0
    return arithmetic * step.shape.processes / (shape.processes * faster) + reduce_s(shape, step.gradients_gb)


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


def assumed(step: Step, found: Iterable[Shape]) -> list[str]:
    """What the model of a step takes for granted, a line each."""
    every = [step.shape, *found]
    lines = [
        "step: the global batch stays; arithmetic is shared by all processes, gradients are summed in a ring after it",
        f"gradients: {step.gradients_gb:g} GB a step"
        + ("" if step.gradients_gb else ", so networks make no difference (--gradients-gb: bytes of the parameters)"),
    ]
    if len({family(shape.machine_type) for shape in every}) > 1:
        lines.append("accelerators: as fast as their peak of dense 16-bit arithmetic; unknown ones are all alike")
    networks = {shape.machine_type: shape.gbit_s for shape in every if shape.known and shape.nodes > 1}
    if networks:
        lines.append("network: " + ", ".join(f"{name} {gbit:g} Gbit/s" for name, gbit in sorted(networks.items())))
    unknown = sorted({shape.machine_type for shape in every if not shape.known and shape.nodes > 1})
    if unknown:
        lines.append(f"network: {GBIT_S:g} Gbit/s of {', '.join(unknown)}, which is not in the table")
    return lines
