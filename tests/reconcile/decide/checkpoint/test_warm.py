"""Warm copies of a gang's disks: when they are taken, what they may cost, and how little a move then has to copy."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from spotkeeper.contract.cloud import CreateDisk, CreateSnapshot, DeleteSnapshot, Result, ResultKind
from spotkeeper.contract.job import RequestKind
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.market import PriceRun
from tests.reconcile.world import World, stack
from tests.sim.test_regions import ABROAD, HOME, two_regions

PRICES = {HOME: {ABROAD: 0.02}, ABROAD: {HOME: 0.02}}


def trained(budget: float | None, *, gb: float = 10.0, seconds: float = 3000.0, **more: object) -> World:
    """A gang of two that has trained at home; the copy of a whole disk takes four minutes, of a difference 15 s."""
    spec = {"regions": (HOME, ABROAD), **more}
    the_stack = replace(two_regions(stack()), warm_usd=budget, egress=PRICES)
    world = World(nodes=2, the_stack=the_stack, **spec)  # type: ignore[arg-type]
    world.disk_gb, world.shot_s, world.diff_s = gb, 240.0, 15.0
    world.submit()
    world.until(world.training, 300)
    world.run(seconds)
    return world


def snapshots(world: World) -> list[CreateSnapshot]:
    return list(dict.fromkeys(action for _, action, _ in world.made if isinstance(action, CreateSnapshot)))


def standing_s(world: World) -> float:
    """Spot becomes dear at home, and the gang goes abroad once machines wait there; return how long it stood still."""
    gen, now = world.record().gen, world.t
    runs = [PriceRun(now, usd, zone) for zone, usd in (("z-a", 0.9), ("y-b", 0.3), ("y-c", 0.9))]
    world.prices["pool"] = tuple(runs)
    world.until(lambda: world.record().stop, 3 * 3600)
    stopped = world.record().stop_since
    world.until(lambda: world.training() and world.record().gen > gen, 1200)
    assert world.record().zone == "y-b" and world.started[-1][1] is not None
    return world.record().gen_since - stopped


def test_with_a_warm_copy_a_move_stands_still_for_less_than_a_minute() -> None:
    cold, warm = trained(None), trained(500.0)
    assert standing_s(cold) > 240
    assert standing_s(warm) <= 60
    newest = warm.started[-1][1]
    assert newest == max(commit for _, commit in warm.started if commit is not None), "no step is lost"
    last = snapshots(warm)[-1]
    assert last.region == ABROAD, "else it would not be a difference to the warm copy"
    made = {action.number for _, action, _ in warm.made if isinstance(action, CreateDisk) and action.snapshot}
    assert made == {warm.record().nodes[0].disk}, "no disk is made from a warm copy"
    warm.run(120)
    assert not warm.shots or all(node.warm is not None for node in warm.record().nodes)


def test_warm_copies_cost_what_the_stack_file_allows() -> None:
    """10 GB for each of two nodes cost $0.40. With $288 a month there is one each hour."""
    world = trained(288.0, seconds=4 * 3600)
    taken = [one for one in world.events(Event.EGRESS) if one.cause == "warm copy"]
    assert 6 <= len(taken) <= 10 and all(one.usd == pytest.approx(0.2) for one in taken)
    assert {one.detail for one in taken} == {f"{HOME} -> {ABROAD}"}
    assert len(world.shots) == 2, "the older ones are deleted"
    deleted = [action for _, action, _ in world.made if isinstance(action, DeleteSnapshot)]
    assert len(set(deleted)) == len(taken) - 2
    assert world.record().limits.spent >= sum(one.usd or 0.0 for one in taken)
    world.request(RequestKind.CANCEL)
    world.run(300)
    assert world.shots == {}


@pytest.mark.parametrize(
    ("budget", "more"), [(None, {}), (0.3, {}), (500.0, {"regions": ()})], ids=["none", "too small", "at home only"]
)
def test_without_a_budget_or_another_region_there_are_none(budget: float | None, more: dict[str, object]) -> None:
    assert snapshots(trained(budget, **more)) == []


def test_a_refused_warm_copy_is_not_asked_for_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world, asked = trained(None, seconds=600), list[float]()
    perform = world.perform

    def refused(action: object, deadline_s: float) -> Result:
        if isinstance(action, CreateSnapshot):
            asked.append(world.t)
            return Result(action, ResultKind.PERMANENT, "no")
        return perform(action, deadline_s)  # type: ignore[arg-type]

    monkeypatch.setattr(world, "perform", refused)
    world.memory.stack = world.stack = replace(world.stack, warm_usd=500.0)
    world.run(3000)
    assert 2 <= len(asked) <= 12 and world.training()
