"""On markets that turn against the rule no deadline is missed that could be held, and what is lost is bounded."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.reconcile.select.hostile_markets import bound, feasible, story

QUICK = 120
STORIES = 20_000


def broken(seeds: Iterable[int]) -> list[str]:
    out = []
    for seed in seeds:
        case, done, player = story(seed)
        if done.missed and feasible(case.terms):
            out.append(f"{seed}: misses its deadline: {case.terms}")
        if not done.missed and done.cost > bound(case) + player.beyond + 1e-6:
            out.append(f"{seed}: {done.cost:.2f} h, above {bound(case):.2f}: {case.terms}")
    return out


def test_no_deadline_is_missed_and_spots_extra_cost_is_bounded() -> None:
    assert broken(range(QUICK)) == []


@pytest.mark.matrix
def test_many_more_hostile_markets() -> None:
    assert broken(range(QUICK, STORIES)) == []


def test_the_hostile_markets_preempt_and_raise_prices() -> None:
    """Else nothing of this could fail."""
    told = [story(seed) for seed in range(60)]
    assert sum(done.preemptions for _, done, _ in told) > 100
    assert any(player.beyond for _, _, player in told)
    assert any(done.cost > case.on_demand_only for case, done, _ in told)
