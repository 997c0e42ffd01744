"""Everything at once, by hypothesis: invocations of the function that freeze in the middle of a round and thaw 20 to
40 steps later, or die there; lost answers; events twice and out of order; partial and stale lists; throttling;
capacity and prices that change; clocks that are off by minutes (machines) and seconds (functions).

SAFETY is checked by ``World`` at every write, call and second. LIVENESS: when the faults stop, every job trains
again and ends, and no machine, disk, snapshot or grant is left (``World.settle``).

``SPOTKEEPER_STORIES_EXAMPLES`` (default 14, within which each broken rule of ``test_broken_rules_are_found.py`` is
noticed, and 100 in ``make stories``) and ``SPOTKEEPER_STORIES_STEPS`` (default 60) say how long to look; with
``SPOTKEEPER_STORIES_RANDOM`` set, every run looks elsewhere, with ``SPOTKEEPER_STORIES_SHRINK`` a story that fails is
made short.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from spotkeeper.contract.job import Checkpoint, RequestKind
from spotkeeper.local.core.vm import LocalVm
from tests.properties.actors import MAKES, UNDISTURBED, Plan, no_threads
from tests.properties.plane import ZONES
from tests.properties.world import JOBS, World
from tests.sizes import size

EXAMPLES = int(os.environ.get("SPOTKEEPER_STORIES_EXAMPLES", size(5, 100)))
STEPS = int(os.environ.get("SPOTKEEPER_STORIES_STEPS", "60"))
RANDOM = bool(os.environ.get("SPOTKEEPER_STORIES_RANDOM"))  # another look every time, for long runs
SHRINK = bool(os.environ.get("SPOTKEEPER_STORIES_SHRINK"))  # minutes, so not where a time limit waits
HOOKS = 90  # a busy round has as many; a plan beyond its end leaves it alone
PLANS = st.one_of(
    st.just(UNDISTURBED),
    st.builds(Plan, freeze_at=st.integers(1, HOOKS), thaw_after=st.integers(20, 40)),
    st.builds(Plan, freeze_on=st.just(MAKES), thaw_after=st.integers(20, 60)),  # before it makes something
    st.builds(Plan, die_at=st.integers(1, HOOKS)),
)
INSTANCES = st.integers(0, 2)
ANY = st.integers(0, 1_000)


class Machine(RuleBasedStateMachine):
    """Rules pick their victim by number, so that a shrunken story stays a story."""

    world: World

    @initialize(
        seed=ANY, cap=st.sampled_from((3, 5)), replicated=st.booleans(), policy=st.sampled_from(("balanced", "spot"))
    )
    def begin(self, seed: int, cap: int, replicated: bool, policy: str) -> None:
        self.world = World(seed, cap, checkpoint=Checkpoint(replicated=replicated), policy=policy)
        self.world.submit(JOBS[0])

    def vm(self, number: int) -> LocalVm | None:
        running = [vm for vm in self.world.plane.vms() if vm.wire.status == "RUNNING"]
        return running[number % len(running)] if running else None

    # -- time and the function

    @rule(seconds=st.integers(1, 90))
    def time_passes(self, seconds: int) -> None:
        self.world.advance(seconds)

    @rule(seconds=st.integers(30, 300))
    def much_time_passes(self, seconds: int) -> None:
        self.world.advance(seconds)

    @rule(plan=PLANS, instance=INSTANCES)
    def tick(self, plan: Plan, instance: int) -> None:
        self.world.tick(plan, instance)

    @rule(plan=PLANS, instance=INSTANCES, job=ANY)
    def notify(self, plan: Plan, instance: int, job: int) -> None:
        self.world.round(self.world.jobs[job % len(self.world.jobs)], plan, instance)

    @rule(index=ANY, again=st.booleans(), plan=PLANS)
    def event_arrives(self, index: int, again: bool, plan: Plan) -> None:
        self.world.event(index, again, plan)

    @rule(down=st.booleans())
    def function_fails(self, down: bool) -> None:
        self.world.function_down = down

    @rule(on=st.booleans())
    def syncs_freeze_and_die(self, on: bool) -> None:
        self.world.sync_faults = on

    @rule()
    def leases_run_out(self) -> None:
        """A frozen holder's lease ends long before he thaws."""
        for key in [key for key in self.world.bucket.blobs if key.endswith("/lease")]:
            del self.world.bucket.blobs[key]

    # -- machines

    @rule(number=ANY, notice=st.booleans())
    def preempt(self, number: int, notice: bool) -> None:
        if (vm := self.vm(number)) is not None:
            self.world.plane.preempt(vm, notice=notice)

    @rule(number=ANY)
    def reboot(self, number: int) -> None:
        if (vm := self.vm(number)) is not None and vm.id in self.world.guests:
            self.world.reboot(self.world.guests[vm.id])

    @rule(number=ANY)
    def hang(self, number: int) -> None:
        if (vm := self.vm(number)) is not None and vm.id in self.world.guests:
            self.world.guests[vm.id].hung = True

    @rule(count=st.integers(0, 2))
    def boots_hang(self, count: int) -> None:
        self.world.stuck = count

    @rule(number=ANY)
    def hang_for_long(self, number: int) -> None:
        """Until it is found out, superseded, and its disk is wanted elsewhere."""
        self.hang(number)
        self.world.advance(420)

    @rule()
    def all_come_to_themselves(self) -> None:
        for guest in self.world.guests.values():
            guest.hung = False

    @rule(zone=st.sampled_from(ZONES), nodes=st.sampled_from((0, 1, 2, 99)), spot=st.booleans(), reclaim=st.booleans())
    def capacity_changes(self, zone: str, nodes: int, spot: bool, reclaim: bool) -> None:
        self.world.plane.capacity(zone, nodes, spot=spot, reclaim=reclaim)

    @rule(factor=st.sampled_from((0.5, 1.0, 2.0, 4.0)))
    def prices_change(self, factor: float) -> None:
        self.world.prices(factor)

    # -- answers

    @rule(zone=st.sampled_from(ZONES), down=st.booleans())
    def zone_does_not_answer(self, zone: str, down: bool) -> None:
        self.world.plane.partition(zone, down)

    @rule(count=st.integers(0, 4))
    def lists_are_stale(self, count: int) -> None:
        self.world.line.stale = count

    @rule(count=st.integers(0, 4))
    def answers_of_the_cloud_are_lost(self, count: int) -> None:
        self.world.line.lost = count

    @rule(count=st.integers(0, 6))
    def the_cloud_throttles(self, count: int) -> None:
        self.world.line.throttled = count

    @rule(count=st.integers(0, 3))
    def answers_of_the_bucket_are_lost(self, count: int) -> None:
        self.world.bucket.weather.lost = count

    @rule(count=st.integers(0, 3))
    def the_bucket_throttles(self, count: int) -> None:
        self.world.bucket.weather.throttled = count

    @rule(count=st.integers(0, 5))
    def answers_to_agents_are_lost(self, count: int) -> None:
        self.world.lost_answers = count

    # -- users and their code

    @precondition(lambda self: len(self.world.jobs) < len(JOBS))
    @rule()
    def second_job(self) -> None:
        self.world.submit(JOBS[1])

    @rule(
        kind=st.sampled_from(
            (RequestKind.SWAP, RequestKind.MOVE, RequestKind.PAUSE, RequestKind.RESUME, RequestKind.CANCEL)
        ),
        node=st.integers(0, 1),
        zone=st.sampled_from(ZONES),
        job=ANY,
    )
    def user_asks(self, kind: RequestKind, node: int, zone: str, job: int) -> None:
        self.world.request(self.world.jobs[job % len(self.world.jobs)], kind, node=node, zone=zone)

    @rule(node=st.integers(0, 1))
    def user_code_fails(self, node: int) -> None:
        self.world.crashing = node + 1

    # -- every step

    def check_invariants(self, *args: object, **kwargs: object) -> None:
        """After every rule, each frozen actor comes one step nearer to its end, and the properties are checked."""
        if hasattr(self, "world"):
            self.world.turn()
            self.world.check()
        super().check_invariants(*args, **kwargs)  # type: ignore[arg-type]

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self.world.settle()
        finally:
            self.world.close()


@pytest.fixture(autouse=True)
def _one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    no_threads(monkeypatch)


def look(examples: int) -> None:
    phases = (Phase.generate, Phase.shrink) if SHRINK else (Phase.generate,)
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            derandomize=not RANDOM,
            phases=phases,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )


def test_random_stories_neither_double_nor_leak_and_converge() -> None:
    look(EXAMPLES)
