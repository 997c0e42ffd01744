"""The thirteen stories in which the function is killed, frozen, shown old views and left without news.

A story begins with a gang that trains (but for ``start`` and ``stockout``), something happens, and it is over when
``done`` holds. Then the job ends, and nothing may be left. ``lost``: how many steps the story may cost, whatever
befalls the function meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from spotkeeper.contract.job import RequestKind
from spotkeeper.contract.record import Outcome, Phase
from spotkeeper.contract.stack import Model, StackState
from spotkeeper.reconcile.controller.lease import BEAT_S
from spotkeeper.reconcile.decide.queue.reclaim import PROTECTED_S
from tests.sim.function import Function, Point
from tests.sim.gang import SAVE_S
from tests.sim.world import ZONES, Job, World, small_stack

JOB, OTHER = "abcd2345", "bcde2345"
INTERVAL_S = 60.0
ROUGH = int(INTERVAL_S + SAVE_S) + 2  # steps of a second each: what an unannounced end may cost
LOOK_S = BEAT_S + 0.5
CONVERGED_S = 3600.0
CLEAN_S = 300.0  # two ticks, a lease that nobody gives back, and a machine's way out


@dataclass
class Play:
    """One performance of a story."""

    world: World
    job: Job
    gen: int = 0  # the newest generation when the story began

    @property
    def on(self) -> bool:
        """All train, in a newer generation than the story began with, and nothing is under way."""
        record = self.world.record(JOB)
        return record.gen > self.gen and self.job.training and not record.stop and record.roll is None

    @property
    def ended(self) -> Outcome | None:
        record = self.world.record(JOB)
        return record.outcome if record.phase is Phase.DONE else None

    def preempt(self, node: int, notice_s: float) -> None:
        machine = self.world.member(JOB, node)
        assert machine is not None
        self.world.preempt(machine, notice_s)

    def spot(self, machines: int | None) -> None:
        """How many spot machines each zone carries; None: as many as are wanted."""
        for zone in ZONES:
            if machines is None:
                self.world.cloud.limits.pop((zone, Model.SPOT), None)
            else:
                self.world.cloud.limits[zone, Model.SPOT] = machines

    def models(self) -> set[Model]:
        return {node.cur.model for node in self.world.record(JOB).nodes if node.cur is not None}


@dataclass(frozen=True)
class Scenario:
    """``fresh``: the story tells the start itself."""

    name: str
    act: Callable[[Play], None]
    done: Callable[[Play], bool]
    lost: int = 0
    fresh: bool = False
    nodes: int | dict[str, int] = 2
    steps: int = 1_000_000
    on_demand: int = 0
    outcome: Outcome = Outcome.CANCELLED
    crashes: int = 0
    priority: str = "normal"
    regions: tuple[str, ...] = ()  # of the job
    before_s: float = 70.0  # how long the gang trains before the story begins


@dataclass
class Told:
    """What became of a performance."""

    why: str = ""  # it went wrong
    lost: int = 0
    points: list[Point] = field(default_factory=list)
    requests: int = 0
    looks: int = 0
    beats: int = 0  # renewals of a lease
    took_s: float = 0.0
    remarks: list[str] = field(default_factory=list)


def perform(
    scenario: Scenario,
    interfere: Callable[[World], None] = lambda _: None,
    *,
    lost: int | None = None,
    but: str = "nothing",
    seed: int = 7,
    shipped: bool = False,
    on: Callable[[StackState], StackState] = lambda stack: stack,
) -> Told:
    """Play it, with something done to the function from the moment on at which the story begins.

    ``lost``: steps that may be done again, where that is not what the story promises. ``but``: a property that
    what is done takes away. ``shipped``: leases as the function ships them, and looks that take long enough for them
    to be renewed; otherwise they last 75 s, and nothing takes time. ``on``: the cloud (``tests.sim.ec2.on_ec2``).
    """
    stack = on(small_stack(3, on_demand=scenario.on_demand))
    world = World(stack=stack, seed=seed, look_s=LOOK_S if shipped else 0.0)
    world.beats = shipped
    world.meter.counts = world.function.counts
    play = Play(world, Job(JOB, None, world, 0, 1.0, 1.0))  # type: ignore[arg-type]
    if not scenario.fresh:
        _begin(play, scenario)
        assert world.until(lambda: play.job.training, 600), "the gang never trains"
        world.run(scenario.before_s)
    told = Told(points=[])
    play.gen = world.record(JOB).gen if not scenario.fresh else 0
    function = world.function
    function.points, first, looks, begun = told.points, function.requests, function.counts["list"], world.engine.t
    function.restart_points()
    interfere(world)
    if scenario.fresh:
        _begin(play, scenario, act=scenario.act)
    else:
        scenario.act(play)
    converged = world.until(lambda: scenario.done(play), CONVERGED_S)
    told.requests, told.looks = function.requests - first, function.counts["list"] - looks
    told.beats = function.counts["beat"]
    told.took_s = world.engine.t - begun
    _calm(function, world)
    if not converged:
        told.why = f"does not converge: {_state(play)}"
        return told
    _end(play, scenario, told, scenario.lost if lost is None else lost, but)
    return told


def _begin(play: Play, scenario: Scenario, act: Callable[[Play], None] | None = None) -> None:
    if act is not None:
        act(play)
    more = {"priority": scenario.priority, "regions": scenario.regions}
    play.job = play.world.submit(JOB, nodes=scenario.nodes, steps=scenario.steps, interval_s=INTERVAL_S, **more)
    play.job.crash_after_s = 100.0
    play.job.crashes_left = scenario.crashes


def _calm(function: Function, world: World) -> None:
    function.points, function.kill_at, function.stall_at, function.miss = None, -1, -1, -1
    world.cloud.stale_at = -1
    function.down = False


def _end(play: Play, scenario: Scenario, told: Told, promised: int, but: str) -> None:
    world = play.world
    if play.ended is None and scenario.outcome is Outcome.CANCELLED:
        world.request(JOB, RequestKind.CANCEL)
    clean = world.until(lambda: not world.left_over(), CLEAN_S)
    told.lost = sum(steps for _, steps in play.job.lost)
    record = world.record(JOB)
    if broken := [what for what in world.violations if f" {but}: " not in what]:
        told.why = "; ".join(broken)
    elif not clean:
        told.why = f"left over {CLEAN_S:.0f} s after the end: {world.left_over()}"
    elif record.outcome is not scenario.outcome:
        told.why = f"ended as {record.outcome}: {record.reason}"
    elif told.lost > promised:
        told.why = f"{told.lost} steps were done again, {promised} are promised at most: {play.job.lost}"


def _state(play: Play) -> str:
    record = play.world.record(JOB)
    slots = [f"r{i}: {node.cur and (node.cur.attempt, node.cur.state.value)}" for i, node in enumerate(record.nodes)]
    return f"{record.phase.value} gen {record.gen} stop {record.stop} {record.reason!r} {slots} {play.world.violations}"


# -- the stories


def _start(play: Play) -> None:
    pass


def _stockout(play: Play) -> None:
    play.world.cloud.limits["z-a", Model.SPOT] = 1


def _two_losses(play: Play) -> None:
    play.preempt(0, -1)
    play.world.engine.after(20.0, lambda: _again(play, 1))


def _again(play: Play, node: int) -> None:
    machine = play.world.member(JOB, node)
    if machine is not None:
        play.world.preempt(machine, -1)


def _no_spot(play: Play) -> None:
    play.spot(0)
    play.preempt(1, -1)
    play.world.engine.after(900.0, lambda: play.spot(None))


def _back_on_spot(play: Play) -> bool:
    return play.on and play.models() == {Model.SPOT} and play.world.record(JOB).gen >= play.gen + 2


def _move(play: Play) -> None:
    play.world.request(JOB, RequestKind.MOVE, zone="z-b")


def _moved(play: Play) -> bool:
    record = play.world.record(JOB)
    return play.on and record.zone == "z-b" and record.move is None


def _resize(play: Play) -> None:
    """Three become one; when that one trains, two more come back, on blank disks, and the highest goes again."""
    play.world.request(JOB, RequestKind.RESIZE, nodes=1)
    _then(play, 1, lambda: play.world.request(JOB, RequestKind.RESIZE, nodes=3))
    _then(play, 3, lambda: play.world.request(JOB, RequestKind.RESIZE, nodes=2))


def _then(play: Play, members: int, what: Callable[[], None]) -> None:
    """Once so many train in a newer generation: half a minute later."""

    def look() -> None:
        record = play.world.record(JOB)
        if play.on and len(record.members) == members and record.size == members:
            play.world.engine.after(30.0, what)
        else:
            play.world.engine.after(5.0, look)

    play.world.engine.after(5.0, look)


def _resized(play: Play) -> bool:
    record = play.world.record(JOB)
    return play.on and len(record.members) == 2 == record.size and len(play.world.cloud.machines) == 2


def _recall(play: Play) -> None:
    """Another job comes, for which this one has to make room: 7 of 8 machines."""
    play.world.submit(OTHER, nodes=7, steps=100, interval_s=INTERVAL_S)


def _came_back(play: Play) -> bool:
    return play.on and play.world.record(OTHER).phase is Phase.DONE


def _cancelled(play: Play) -> None:
    play.preempt(1, -1)
    play.world.engine.after(30.0, lambda: play.world.request(JOB, RequestKind.CANCEL))


SCENARIOS = (
    Scenario("start", _start, lambda play: play.on, fresh=True),
    Scenario("notice", lambda play: play.preempt(1, 120), lambda play: play.on),
    Scenario("silent loss", lambda play: play.preempt(1, -1), lambda play: play.on, ROUGH),
    Scenario("master loss", lambda play: play.preempt(0, -1), lambda play: play.on, ROUGH),
    Scenario("two losses", _two_losses, lambda play: play.on, 2 * ROUGH),
    Scenario("stockout", _stockout, lambda play: play.on, fresh=True),
    Scenario("on-demand and back", _no_spot, _back_on_spot, ROUGH, on_demand=3),
    Scenario("zone move", _move, _moved),
    Scenario("resize", _resize, _resized, nodes={"min": 1, "max": 3}),
    Scenario("recall", _recall, _came_back, priority="low", before_s=PROTECTED_S),
    Scenario("user crash", lambda play: None, lambda play: play.on, ROUGH, crashes=1),
    Scenario("cancel during recovery", _cancelled, lambda play: play.ended is not None, ROUGH),
    Scenario("success", lambda play: None, lambda play: play.ended is not None, steps=150, outcome=Outcome.SUCCEEDED),
)
