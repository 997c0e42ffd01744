"""Which notice follows from what the metadata server shows."""

from __future__ import annotations

from dataclasses import replace as changed

import pytest

from spotkeeper_agent.cloud import notice
from spotkeeper_agent.cloud.notice import Cause, Change, CloudWarning, Instance, Notice


def seen(warning: CloudWarning | None = None) -> Instance:
    return Instance("1", "n", "z", warning=warning)


PREEMPTED = Notice(Cause.PREEMPTED, 1120, 1000.0)


MAINTENANCE = Notice(Cause.MAINTENANCE, 1060, 1000.0)


NEAR = Notice(Cause.MAINTENANCE, 1030, 1000.0)


RISK = Notice(Cause.REBALANCE, 4600, 1000.0)


@pytest.mark.parametrize(
    ("known", "warning", "given", "withdrawn"),
    [
        (None, None, None, None),
        (None, CloudWarning(Cause.PREEMPTED), PREEMPTED, None),
        (PREEMPTED, CloudWarning(Cause.PREEMPTED), None, None),
        (PREEMPTED, None, None, PREEMPTED),
        (None, CloudWarning(Cause.MAINTENANCE), MAINTENANCE, None),
        (NEAR, CloudWarning(Cause.PREEMPTED), changed(PREEMPTED, deadline=1030), None),  # the nearer end, said once
        (PREEMPTED, CloudWarning(Cause.MAINTENANCE), None, None),
        (Notice(Cause.SHUTDOWN, 1025, 1000.0), None, None, None),
        # EC2 says when: the same deadline is no news, another one is
        (None, CloudWarning(Cause.PREEMPTED, 1090.4), changed(PREEMPTED, deadline=1090), None),
        (changed(PREEMPTED, deadline=1090), CloudWarning(Cause.PREEMPTED, 1090.4), None, None),
        (PREEMPTED, CloudWarning(Cause.PREEMPTED, 1090.4), changed(PREEMPTED, deadline=1090), PREEMPTED),
        (None, CloudWarning(Cause.MAINTENANCE, 1030.0), NEAR, None),
        # nobody knows when a machine at risk ends; once it is known, that counts, and nothing else does
        (None, CloudWarning(Cause.REBALANCE), RISK, None),
        (RISK, CloudWarning(Cause.REBALANCE), None, None),
        (RISK, CloudWarning(Cause.PREEMPTED, 1120.0), PREEMPTED, RISK),
        (PREEMPTED, CloudWarning(Cause.REBALANCE), None, None),
        (NEAR, CloudWarning(Cause.REBALANCE), None, None),
        (RISK, None, None, RISK),
    ],
)
def test_notices(
    known: Notice | None, warning: CloudWarning | None, given: Notice | None, withdrawn: Notice | None
) -> None:
    change = notice.observe(known, seen(warning), 120.0, 1000.0)
    assert (change.given, change.withdrawn) == (given, withdrawn)


def test_a_rebalance_deadline_is_postponed() -> None:
    """Its deadline moves on long before anybody would stop for it; no other deadline does."""
    assert notice.prolong(RISK, 1000.0) == notice.prolong(None, 1000.0) == notice.prolong(PREEMPTED, 1119.0) == Change()
    assert notice.prolong(RISK, 2800.0) == Change(Notice(Cause.REBALANCE, 6400, 2800.0), RISK)


def test_only_a_machine_at_risk_may_run_on() -> None:
    assert [one.urgent for one in (PREEMPTED, MAINTENANCE, RISK)] == [True, True, False]


def test_maintenance_weeks_ahead_is_no_notice_yet() -> None:
    assert notice.scheduled(1000.0 + 2 * 86400, 1000.0) is None
    assert notice.scheduled(4600.0, 1000.0) == CloudWarning(Cause.MAINTENANCE, 4600.0)


def test_shutdown_never_gives_more_time_than_the_notice_before_it() -> None:
    assert notice.shutdown(None, 25, 1000).deadline == 1025
    assert notice.shutdown(Notice(Cause.PREEMPTED, 1010, 900), 25, 1000).deadline == 1010
