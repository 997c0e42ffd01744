"""A search in a world of ``world.py``."""

from __future__ import annotations

from dataclasses import dataclass, field

from spotkeeper.contract.job import Checkpoint, JobRequest, JobSpec, Mirror, RequestKind
from spotkeeper.contract.record import Hold, Outcome, Phase
from spotkeeper.contract.sweep import SweepState, Trial
from tests.reconcile.world import World, stack

RUNGS = (20, 60)
END = 100


@dataclass
class Search:
    """``count`` trials in one world. The trial with number n reports n at every step, unless ``values`` says else."""

    count: int = 4
    parallel: int = 4
    eta: int = 2
    rungs: tuple[int, ...] = RUNGS
    max_usd: float | None = None
    nodes: int = 1
    static: int = 0  # static machines
    checkpoint: Checkpoint = field(default_factory=lambda: Checkpoint(mirror=Mirror(every_min=1000.0)))
    world: World = field(init=False)
    values: dict[tuple[int, int], float | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.world = World(self.nodes, the_stack=stack(max_machines=20, static=self.static), steps=END)
        self.world.value = lambda job, step: self.values.get((int(job[-2:]), step), float(int(job[-2:])))

    def spec(self, number: int) -> JobSpec:
        trial = Trial("lr", number, "loss", "min", 0, self.count, self.rungs, self.eta, self.parallel, self.max_usd)
        return JobSpec(f"lr-{number:04d}", ("train.py",), self.nodes, checkpoint=self.checkpoint, trial=trial)

    def submit(self, *numbers: int) -> None:
        for number in numbers or range(self.count):
            self.world.submit(job(number), self.spec(number))

    def record(self, number: int) -> object:
        return self.world.record(job(number))

    def outcomes(self) -> list[Outcome | None]:
        return [self.world.record(job(number)).outcome for number in range(self.count)]

    def over(self) -> bool:
        return all(self.world.record(job(number)).phase is Phase.DONE for number in range(self.count))

    def holds(self, number: int) -> bool:
        record = self.world.record(job(number))
        return record.phase is Phase.HOLD and record.hold is Hold.RUNG

    def state(self) -> SweepState:
        return self.world.store.read_sweep("lr").value

    def request(self, number: int, kind: RequestKind) -> None:
        self.world.store.put_request(job(number), JobRequest(f"r{self.world.t}", kind, self.world.t, "ann"))


def job(number: int) -> str:
    return f"sweepj{number:02d}"
