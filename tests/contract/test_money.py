"""What a deadline can hold is said at submit, with the earliest that holds and its price."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.market import PriceRun, Prices
from spotkeeper.contract.parse import check
from spotkeeper.contract.parse.check_run import JobContext
from spotkeeper.contract.stack import Model, PoolState, ReservedCapacity
from tests.contract.samples import STACK

NOW = 1_800_000_000.0  # 2027-01-15 08:00 UTC


def told(**fields: object) -> list[str]:
    spec = JobSpec("job", ("train.py",), **fields)  # type: ignore[arg-type]
    return [problem.message for problem in check.feasible(spec, STACK.pools, NOW)]


def test_an_impossible_deadline_names_the_earliest_one_and_its_price() -> None:
    (message,) = told(work="40h", deadline="39h", nodes=2)
    assert message == (
        "cannot be met: training takes 40h (`work`), and starting takes 10 min, so the earliest possible deadline is "
        "2027-01-17 00:10 UTC (`deadline: 40.2h`), at a cost of about $241.00 on-demand"
    )


@pytest.mark.parametrize("deadline", ["41h", "2027-01-17T00:10Z", None])
def test_a_feasible_deadline_has_no_problem(deadline: str | None) -> None:
    assert told(work="40h", deadline=deadline) == []


def test_the_suggested_deadline_is_feasible() -> None:
    """Also where the clock stands between two minutes, and where nobody tells how long it trains."""
    for work in ("40h", "7m", None):
        spec = JobSpec("job", ("train.py",), work=work, deadline="2m")
        (problem,) = check.feasible(spec, STACK.pools, NOW + 31.0)
        day, time, span = re.findall(r"deadline is (\S+) (\S+) UTC \(`deadline: (.*?)`\)", problem.message)[0]
        for deadline in (f"{day}T{time}Z", span):
            assert not list(check.feasible(replace(spec, deadline=deadline), STACK.pools, NOW + 31.0)), deadline


def test_unknown_work_causes_no_problem() -> None:
    assert told(deadline="1h") == []
    assert "starting alone takes 10 min" in told(deadline="5m")[0]


FEW = (replace(STACK.pools[0], max_on_demand=1),)


@pytest.mark.parametrize(
    ("fields", "pools", "words"),
    [
        ({"policy": "spot", "deadline": "9h", "work": "4h"}, STACK.pools, "`policy: spot` buys no on-demand machine"),
        ({"deadline": "9h", "work": "4h", "nodes": 2}, FEW, "1 of its 2 machines may be on-demand or static"),
        ({"deadline": "9h", "work": "4h", "nodes": 2, "max_on_demand": 0}, FEW, "0 of its 2 machines"),
        ({"deadline": "9h"}, STACK.pools, "it can be checked only after the first steps"),
        ({"max_price": 0.5}, STACK.pools, "(the lowest is $1.000), so the job uses on-demand until a spot price"),
        ({"max_price": 0.5, "policy": "spot"}, STACK.pools, "so the job waits until a spot price falls"),
        (
            {"max_usd": 7.0, "work": "4h", "nodes": 2},
            STACK.pools,
            "`work` costs at least $8.00",
        ),
        ({"policy": "on-demand", "max_wait": "30m"}, STACK.pools, "has no effect: `policy: on-demand` does not wait"),
        ({"policy": "spot", "max_wait": "0m"}, STACK.pools, "holds the job as soon as it has no spot machine"),
        ({"data_region": "us-east1"}, STACK.pools, "data_region: us-east1 has no effect without `data_gb`"),
    ],
)
def test_surprising_values_cause_cautions(fields: dict[str, object], pools: tuple[PoolState, ...], words: str) -> None:
    (line,) = check.cautions_of(JobSpec("job", ("train.py",), **fields), pools)  # type: ignore[arg-type]
    assert words in line


@pytest.mark.parametrize(("told", "limit", "notes"), [(0.4, 0.5, 0), (0.4, 0.3, 1), (1.5, 1.2, 1)])
def test_the_clouds_price_replaces_the_list_price(told: float, limit: float, notes: int) -> None:
    prices = {"workers": Prices("workers", NOW, NOW, (PriceRun(NOW, told),))}
    spec = JobSpec("job", ("train.py",), max_price=limit, pools=("workers",))
    assert len(list(check.cautions(spec, STACK, prices, NOW))) == notes
    stale = list(check.cautions(spec, STACK, prices, NOW + 25 * 3600.0))
    assert bool(stale) == (limit < 1.0), "one that is a day old counts no more"


@pytest.mark.parametrize(
    ("caps", "words"),
    [
        ({"max_machines": 2}, "needs 3 dynamic machines, but `limits.machines` of the stack is 2"),
        (
            {"max_usd_hour": 2.5},
            "needs dynamic machines for at least $3.00 an hour, but `limits.usd_per_hour` of the stack is 2.5",
        ),
        ({"max_machines": 3, "max_usd_hour": 3.0}, ""),
    ],
)
def test_a_job_above_the_stacks_limits_is_refused(caps: dict[str, object], words: str) -> None:
    """One of its four machines is a static machine."""
    job = JobContext(JobSpec("job", ("/x/train.py",), nodes=4), replace(STACK, **caps))
    found = [problem.message for problem in check.job_problems(job)]
    assert len(found) == bool(words) and all(words in message for message in found)


def test_reserved_machines_count_as_paid_for() -> None:
    workers, *others = STACK.pools
    ours = (ReservedCapacity("res", workers.zones[0], 2),)
    stack = replace(STACK, pools=(replace(workers, reservations=ours), *others), max_usd_hour=1.5)
    spec = JobSpec("job", ("/x/train.py",), nodes=4, max_usd=0.01, work="4h", deadline="9h", max_on_demand=1)
    assert not list(check.job_problems(JobContext(spec, stack))), "one of its machines is static, one costs $1"
    assert not list(check.cautions_of(spec, stack.pools)), "four of its machines cannot be preempted"
    assert list(check.job_problems(JobContext(spec, replace(STACK, max_usd_hour=1.5))))
    assert len(list(check.cautions_of(spec, STACK.pools))) == 2


def test_feasible_or_unknown_values_cause_no_caution() -> None:
    plain = JobSpec("job", ("train.py",), nodes=3, deadline="9h", work="4h", max_wait="30m", max_price=2.0)
    assert not list(check.cautions_of(plain, STACK.pools)) and not list(check.cautions_of(plain, ()))


def test_cheapest_is_none_without_such_machines() -> None:
    assert check.cheapest(STACK.pools, Model.ON_DEMAND) == 3.0
    assert check.cheapest((), Model.SPOT) is None
