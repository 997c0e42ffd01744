"""What a deadline can hold is said at submit, with the earliest that holds and its price."""

from __future__ import annotations

import pytest
from spotkeeper.spec import money
from spotkeeper.spec.job import JobSpec
from spotkeeper.spec.model import Model

from tests.spec.samples import STACK

NOW = 1_800_000_000.0  # 2027-01-15 08:00 UTC


def told(**fields: object) -> list[str]:
    spec = JobSpec("job", ("train.py",), **fields)  # type: ignore[arg-type]
    return [problem.message for problem in money.feasible(spec, STACK.pools, NOW)]


def test_a_deadline_that_cannot_be_held_is_told_with_the_earliest_one_and_its_price() -> None:
    (message,) = told(work="40h", deadline="39h", nodes=2)
    assert message == (
        "cannot be held: `work` is 40h, and the earliest is 2027-01-17 00:10 UTC, for about $241.00 on-demand"
    )


@pytest.mark.parametrize("deadline", ["41h", "2027-01-17T00:10Z", None])
def test_one_that_can_be_held_is_not(deadline: str | None) -> None:
    assert told(work="40h", deadline=deadline) == []


def test_nothing_is_said_of_work_that_is_not_known() -> None:
    assert told(deadline="1h") == []


def test_no_machine_is_sold_where_no_pool_sells_it() -> None:
    assert money.cheapest(STACK.pools, Model.ON_DEMAND) == 3.0
    assert money.cheapest((), Model.SPOT) is None
