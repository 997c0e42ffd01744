"""The function dies, freezes, sees old news and misses news at every point of thirteen stories; each ends well.

Sieve's three classes of faults of controllers (https://www.usenix.org/conference/osdi22/presentation/sun):

* **crash mid-round**: the process is killed before the first call of a request, or after any call. Calls that only
  read leave the world as it was, so a kill after one is the kill before it; each *effect* is walked by itself.
* **stale view**: the process freezes at each of those points for longer than a lease lasts, and goes on with what it
  knew; and each look at the cloud in turn shows a listing one to three changes old.
* **missed event**: each request in turn never arrives.

``make test`` walks every 32nd point, fewer of the longest stories, and others in each test; ``make stories`` all.

From each point the story must reach its end with no safety property broken, no more steps lost than promised, and
nothing left over: no machine, disk, snapshot, grant, marker, name, request or fact.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from spotkeeper.reconcile.controller import tick
from spotkeeper.reconcile.controller.lease import SHORT_S
from spotkeeper.reconcile.decide import calls
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.provisioning import slots
from tests.sim.scenarios import LOOK_S, ROUGH, SCENARIOS, Scenario, Told, perform
from tests.sim.world import World
from tests.sizes import WHOLE

ids = [scenario.name for scenario in SCENARIOS]
each = pytest.mark.parametrize("scenario", SCENARIOS, ids=ids)
LEAST = 15  # effects of the shortest story
LEAST_OF_ALL = 400
EVERY = {"recall": 96, "on-demand and back": 96, "resize": 48, "zone move": 48}  # of long stories; 32 of the others
FAST_POLL_S = 2.0  # of an agent that waits, and its turn


def effects(told: Told) -> list[int]:
    return [at for at, point in enumerate(told.points) if point.effect]


def some(scenario: Scenario, points: list[int], first: int) -> list[int]:
    """Points of a story: rounds repeat themselves."""
    every = 1 if WHOLE else EVERY.get(scenario.name, 32)
    return points[first % every :: every]


def few(scenario: Scenario, points: list[int], first: int) -> list[int]:
    """Every seventh point or fewer, others in each story: leases differ by their length only."""
    every = 7 if WHOLE else EVERY.get(scenario.name, 32)
    return points[(SCENARIOS.index(scenario) + first) % every :: every]


def kill(at: int) -> Callable[[World], None]:
    def interfere(world: World) -> None:
        world.function.kill_at = at

    return interfere


def freeze(at: int) -> Callable[[World], None]:
    def interfere(world: World) -> None:
        world.function.stall_at = at

    return interfere


def lose(number: int) -> Callable[[World], None]:
    def interfere(world: World) -> None:
        world.function.miss = world.function.requests + number

    return interfere


def show_old(look: int, versions: int) -> Callable[[World], None]:
    def interfere(world: World) -> None:
        world.cloud.stale_at, world.cloud.stale_by = world.cloud.looks + look + 1, versions

    return interfere


def well(scenario: Scenario, shipped: bool = False) -> Told:
    """The story undisturbed; it tells where it can be disturbed."""
    return _played(ids.index(scenario.name), shipped)


@cache
def _played(number: int, shipped: bool) -> Told:
    told = perform(SCENARIOS[number], shipped=shipped)
    assert told.why == ""
    assert len(effects(told)) >= LEAST
    return told


def test_thirteen_stories_have_so_many_points(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(SCENARIOS) == len(set(ids)) == 13
    told = [well(scenario) for scenario in SCENARIOS]
    points, distinct = sum(len(t.points) for t in told), sum(len(effects(t)) for t in told)
    with capsys.disabled():
        print(f"\n{len(told)} stories: {points} points before and after calls, {distinct} that differ in effect")
    assert distinct >= LEAST_OF_ALL


@each
def test_a_function_killed_at_every_effect_recovers(scenario: Scenario) -> None:
    points = some(scenario, effects(well(scenario)), 0)
    why = {at: told.why for at in points if (told := perform(scenario, kill(at))).why}
    assert why == {}


@each
def test_a_function_frozen_at_every_effect_recovers(scenario: Scenario) -> None:
    points = some(scenario, effects(well(scenario)), 1)
    why = {at: told.why for at in points if (told := perform(scenario, freeze(at))).why}
    assert why == {}


@each
def test_every_request_may_be_lost(scenario: Scenario) -> None:
    requests = well(scenario).requests
    assert requests >= 5
    missed = some(scenario, [*range(requests)], 2)
    why = {number: told.why for number in missed if (told := perform(scenario, lose(number))).why}
    assert why == {}


@each
def test_every_listing_may_be_stale(scenario: Scenario) -> None:
    """A look taken after the record was read is to show what was there then (rule 3). One that does not may cost a
    healthy machine and a save's interval; never two members, two writers, a deleted member, or anything left."""
    looks = well(scenario).looks
    assert looks >= 3
    why = {}
    for look in some(scenario, [*range(looks)], 3):
        for versions in (1, 2, 3):
            told = perform(scenario, show_old(look, versions), lost=scenario.lost + ROUGH, but="S4")
            if told.why:
                why[look, versions] = told.why
    assert why == {}


# -- leases as they are shipped: 4 s, renewed while a round runs


@each
def test_a_function_killed_while_renewing_its_lease_recovers(scenario: Scenario) -> None:
    """The function takes over within seconds, not after 75."""
    points = few(scenario, effects(well(scenario, shipped=True)), 0)
    why = {at: told.why for at in points if (told := perform(scenario, kill(at), shipped=True)).why}
    assert why == {}


@each
def test_a_function_frozen_while_renewing_its_lease_recovers(scenario: Scenario) -> None:
    """Its thread stands still too: another takes the lease over, and meets it when it goes on."""
    points = few(scenario, effects(well(scenario, shipped=True)), 3)
    why = {at: told.why for at in points if (told := perform(scenario, freeze(at), shipped=True)).why}
    assert why == {}


def test_a_dead_rounds_renewed_lease_expires_within_seconds() -> None:
    """With the long lease the same story takes more than a minute longer, where the process dies in its rounds."""
    scenario = next(s for s in SCENARIOS if s.name == "notice")
    undisturbed = well(scenario, shipped=True)
    assert undisturbed.beats > 0
    took = [perform(scenario, kill(at), shipped=True).took_s for at in some(scenario, effects(undisturbed), 0)]
    assert max(took) <= undisturbed.took_s + SHORT_S + LOOK_S + FAST_POLL_S
    long = [perform(scenario, kill(at)).took_s for at in effects(well(scenario))[::7]]
    assert max(long) > max(took) + 30.0, "the leases differ"


@pytest.mark.parametrize("name", ["notice", "resize", "user crash"])
def test_a_fact_of_a_died_round_is_handled_before_the_tick(name: str) -> None:
    """Whatever it is, nobody is due to look: its agent had no answer, and says so."""
    scenario = next(s for s in SCENARIOS if s.name == name)
    undisturbed = well(scenario, shipped=True)
    points = undisturbed.points
    said = [at for at in effects(undisturbed) if points[at].agent and points[at].verb in ("put_fact", "take_lease")]
    late = {}
    for at in some(scenario, said, 0) if name == "resize" else said:
        took = perform(scenario, kill(at), shipped=True).took_s
        if took > undisturbed.took_s + SHORT_S + LOOK_S + FAST_POLL_S:
            late[at] = took - undisturbed.took_s
    assert late == {}


# -- what is broken is seen


def broken(name: str, points: int = 400) -> str:
    """The first complaint about a story whose function is killed anywhere."""
    scenario = next(s for s in SCENARIOS if s.name == name)
    told = perform(scenario)
    for at in effects(told)[:points]:
        if told.why:
            break
        told = perform(scenario, kill(at))
    return told.why


def test_an_unreleased_name_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tick, "_retire", lambda *_: None)
    assert "name" in broken("success")


def test_an_undeleted_disk_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_delete_disks", lambda draft: iter(()))
    assert "left over" in broken("zone move")


def test_an_interrupted_save_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Draft, "halted", lambda self: True)
    assert "steps were done again" in broken("zone move")


def test_a_member_given_up_without_a_fact_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    real = slots._cur

    def cur(draft: Draft, index: int) -> None:
        if draft.record.gen == 1 and draft.record.stop:
            slots.lose(draft, index, "loss")
        else:
            real(draft, index)

    monkeypatch.setattr(slots, "_cur", cur)
    assert "S4" in broken("cancel during recovery")
