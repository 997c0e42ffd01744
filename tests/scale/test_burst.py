"""Simultaneous reports: two rounds and two writes of the record, however many; and a holder's death is noticed.

``make burst`` has the largest, and the longest.
"""

from __future__ import annotations

import statistics

import pytest

from spotkeeper.reconcile.controller.lease import SHORT_S
from spotkeeper_agent.core.sync import ANSWER_S
from tests.scale.burst import ROUND_S, Burst
from tests.sizes import size

COVERED_S = 10.0


@pytest.mark.parametrize("nodes", size([10, 100, 300], [10, 100, 1000, 10_000]))
def test_reports_within_two_seconds_cost_two_rounds(nodes: int) -> None:
    outcome = Burst(nodes).run()
    assert (outcome.rounds, outcome.record_writes) == (2, 2)
    assert outcome.seconds <= COVERED_S


def test_a_dead_rounds_lease_expires_within_seconds() -> None:
    """Three in ten rounds end in the middle, with all the requests of their process."""
    outcomes = [Burst(30, deaths=0.3, seed=seed).run() for seed in range(size(16, 40))]
    deaths = [outcome.killed for outcome in outcomes]
    assert sum(deaths) >= size(4, 10), "holders died at all"
    for outcome in outcomes:
        assert outcome.covered, "nobody waits for a tick: there is none here"
        assert outcome.seconds <= COVERED_S + outcome.killed * (SHORT_S + ROUND_S)
        assert outcome.record_writes <= 2 + outcome.killed
    assert statistics.median(outcome.seconds for outcome in outcomes) <= COVERED_S


def test_minutes_of_reports_extend_no_request_and_are_handled() -> None:
    """Several a second: somebody is new whenever the holder of the lease looks."""
    outcome = Burst(size(150, 2400), spread_s=size(60.0, 120.0)).run()
    assert outcome.covered
    assert outcome.seconds <= COVERED_S
    assert outcome.longest_s <= ANSWER_S, "no agent gives its request up"
