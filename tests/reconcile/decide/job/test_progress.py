"""What a stop costs, in steps after the newest checkpoint; and what the job has cost beyond its work on-demand."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from spotkeeper.contract.facts import Kind
from spotkeeper.contract.job import Nodes
from spotkeeper.contract.record import Limits, Moved
from spotkeeper.reconcile.decide import Times
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.job.progress import REPORTS_S, LostWork, lost_work, move_costs, work
from spotkeeper.reconcile.select.offers import MoveCost
from tests.reconcile.decide.test_decide import NOW, fact
from tests.reconcile.decide.test_guards import Case, Change, calm, on_record, on_snapshot, on_spec
from tests.reconcile.world import stack

STEP_S, SAVE_S = 2.0, 8.0


def stopped(after_s: float = 11.0, *said: object) -> Case:
    """A gang of two stopped so long after the report of step 100; step 90 is saved."""
    record, seen = on_record(stop=True, stop_since=NOW + after_s)(*calm(2, *said))
    return on_snapshot(step_s=STEP_S, save_s=SAVE_S)(record, seen)


@pytest.mark.parametrize(
    ("after_s", "cause", "again"),
    [
        (11.0, "loss", 10 + 5),  # whole steps of two seconds
        (11.0, "crash", 10 + 5),
        (REPORTS_S, "loss", 10 + 30),
        (REPORTS_S + 9.0, "loss", 10 + 30),  # it would have reported again
        (-3.0, "loss", 10),
        (11.0, "notice", 10),  # the gang had time to report
        (11.0, "resize", 10),
    ],
)
def test_after_a_surprise_the_steps_since_the_report_are_estimated(after_s: float, cause: str, again: int) -> None:
    assert lost_work(Draft(*stopped(after_s)), cause) == LostWork(90, again, STEP_S, SAVE_S)


@pytest.mark.parametrize("ended", [Kind.EXIT, Kind.RELEASED])
def test_a_master_that_has_ended_has_reported_its_last_step(ended: Kind) -> None:
    draft = Draft(*stopped(11.0, fact(0, ended, "1")))
    assert lost_work(draft, "loss") == LostWork(90, 10, STEP_S, SAVE_S)


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        (on_record(gen=0), LostWork()),
        (on_snapshot(progress=None), LostWork(0, None, STEP_S, SAVE_S)),
        (on_record(gen=4), LostWork(90, None, STEP_S, SAVE_S)),  # what is reported is of the generation before
        (on_record(given_up="3-90"), LostWork(None, None, STEP_S, SAVE_S)),
        (on_snapshot(step_s=None), LostWork(90, 10, None, SAVE_S)),
        (on_snapshot(save_s=None), LostWork(90, 15, STEP_S, None)),
        (on_record(members=(2, 3)), LostWork(90, 15, STEP_S, SAVE_S)),  # of nodes that the job no longer has
    ],
)
def test_what_is_unknown_of_lost_work_is_left_out(change: Change, lost: LostWork) -> None:
    assert lost_work(Draft(*change(*stopped())), "loss") == lost


# -- what the job has cost beyond its work on-demand

UNPRICED = tuple(replace(pool, prices={}) for pool in stack().pools)


def paid(usd: float = 3.0) -> Case:
    """Two nodes, $2 an hour on-demand, that have done half an hour of work and have half an hour left."""
    record, seen = on_record(limits=Limits(spent=usd))(*calm(2))
    return on_snapshot(step_s=18.0, left_s=1800.0)(record, seen)


@pytest.mark.parametrize(
    ("case", "excess_h"),
    [
        (paid(), 1.0),
        (paid(0.5), -0.25),
        (on_snapshot(left_s=None)(*paid()), 1.0),  # how much is left does not matter
        (on_snapshot(stack=replace(stack(), pools=UNPRICED))(*paid()), 0.0),
        (on_snapshot(step_s=None)(*paid()), 0.0),
        (on_snapshot(progress=None)(*paid()), 0.0),
        (on_spec(nodes=Nodes(1, 2))(*paid()), 0.0),
        (on_spec(nodes=Nodes(2, 2))(*paid()), 1.0),
    ],
)
def test_excess_cost_counts_only_if_work_price_and_nodes_are_known(case: Case, excess_h: float) -> None:
    found = work(Draft(*case))
    assert found is not None
    assert found.excess_h == pytest.approx(excess_h)


def test_without_a_job_file_the_work_is_unknown() -> None:
    assert work(Draft(*on_snapshot(spec=None)(*paid()))) is None


# -- the cost of a move


@pytest.mark.parametrize(
    ("copy_s", "moved", "cost_s"),
    [(300.0, None, 300.0), (0.0, None, 0.0), (300.0, Moved(NOW, 299.0), 300.0), (300.0, Moved(NOW, 301.0), 301.0)],
)
def test_a_move_costs_what_copying_the_disks_takes_at_least_as_long_as_last_time(
    copy_s: float, moved: Moved | None, cost_s: float
) -> None:
    case = on_record(moved=moved)(*on_snapshot(times=Times(copy_s=copy_s))(*calm(2)))
    assert move_costs(Draft(*case)) == dict.fromkeys(("z-b", "z-c"), MoveCost(cost_s))


@pytest.mark.parametrize(
    "change", [on_record(gen=0), on_record(zone=None), on_snapshot(spec=None), on_spec(spread=True)]
)
def test_a_job_without_data_in_one_zone_has_no_move_costs(change: Change) -> None:
    assert move_costs(Draft(*change(*calm(2)))) == {}
