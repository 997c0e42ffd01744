"""A job that may use several regions: what it makes of them on recorded markets, and its money in the simulated world.

The recordings with several regions are replayed by scope: the home zone alone, the zones of its region, all regions.
``SPOTKEEPER_MARKETS`` names a folder of recordings, as for ``policy.py``; the default is the shipped market alone.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the stories are part of the tests

from bench.market._cases import SCOPES, draw, optimum  # noqa: E402
from bench.market.policy import STARTS, Job, Sum  # noqa: E402
from spotkeeper.replay.model import Case  # noqa: E402
from spotkeeper.replay.recording import SHIPPED, read_folder  # noqa: E402
from tests.reconcile.decide.checkpoint.test_warm import standing_s, trained  # noqa: E402
from tests.sim.scenarios import perform  # noqa: E402
from tests.sim.test_crash_points import effects, kill  # noqa: E402
from tests.sim.test_ledger import Books, books  # noqa: E402
from tests.sim.test_regions import STORY, two_regions  # noqa: E402

GOAL, SHIPPED_GOAL = 0.87, 0.70
GOAL_PERCENT = 1.0
GOAL_STANDING_S = 60.0
EVERY = 6  # effects at which the function is killed


def cases(folder: Path) -> Iterator[tuple[str, Case]]:
    """The cases with a deadline of all recordings with several regions, each with its scope."""
    for recording in read_folder(folder):
        if len({zone.region for zone in recording.zones}) > 1:
            for case in draw(recording, STARTS):
                if case.terms.deadline_h is not None:
                    yield SCOPES[int(case.name.split("/")[1]) % len(SCOPES)], case


def replayed(folder: Path) -> dict[str, Sum]:
    """What jobs come to, by scope."""
    out: dict[str, Sum] = defaultdict(Sum)
    job = Job()
    for scope, case in cases(folder):
        out[scope].add(case, optimum(case), job)
    return out


def stories() -> tuple[list[Books], int]:
    """A gang goes abroad and returns, the function killed at every sixth effect: the books, and the steps lost."""
    plain = perform(STORY, on=two_regions)
    points = effects(plain)[::EVERY]
    lost = max(plain.lost, *(perform(STORY, kill(at), on=two_regions).lost for at in points))
    return [books(STORY, at, two_regions) for at in (None, *points)], lost


def figures() -> list[dict[str, object]]:
    """For ``bench/run.py``."""
    named = os.environ.get("SPOTKEEPER_MARKETS")
    found = replayed(Path(named) if named else SHIPPED)
    kind, goal = ("job", GOAL) if named else ("h100_job", SHIPPED_GOAL)
    every, missed = found["all"], sum(one.missed for one in found.values())
    against = f"home zone {found['one'].score:.3f}, home region {found['region'].score:.3f}; {every.cases} cases"
    count = sum(one.cases for one in found.values())
    logging.disable(logging.CRITICAL)  # logs of the killed function
    try:
        told, lost = stories()
    finally:
        logging.disable(logging.NOTSET)
    cold_s, warm_s = (round(standing_s(trained(budget)), 1) for budget in (None, 500.0))
    moved = f"a gang of 2 between regions in the simulated world, with warm copies; without: {cold_s:.0f} s"
    error = max(one.error_percent for one in told)
    share = max(100.0 * one.moved / one.billed for one in told)
    plays = f"{len(told)} runs of the simulated world, the function killed at another point in each"
    return [
        _figure(f"regions.{kind}_score", round(every.score, 4), "", f">= {goal}", every.score >= goal, against),
        _figure("regions.missed", missed, "", "= 0", missed == 0, f"{count} cases"),
        _figure(
            "regions.ledger_error_percent",
            round(error, 4),
            "%",
            f"<= {GOAL_PERCENT:g}",
            error <= GOAL_PERCENT,
            f"the bill, {share:.0f} % of it egress: {plays}",
        ),
        _figure("regions.steps_lost", lost, "steps", "= 0", lost == 0, f"abroad and back: {plays}"),
        _figure("regions.standing_s", warm_s, "s", f"<= {GOAL_STANDING_S:g}", warm_s <= GOAL_STANDING_S, moved),
    ]


def _figure(name: str, value: float, unit: str, goal: str, holds: bool, against: str) -> dict[str, object]:
    return {"name": name, "value": value, "unit": unit, "goal": goal, "holds": holds, "against": against}


if __name__ == "__main__":
    for figure in figures():
        print(figure)
