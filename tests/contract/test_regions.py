"""What a job may use of a stack in several regions."""

from __future__ import annotations

from msgspec.structs import replace

from spotkeeper.contract.job import JobSpec, MachineGroup, named_pools, pools_of
from spotkeeper.contract.parse.check import job_problems
from spotkeeper.contract.parse.check_run import JobContext
from spotkeeper.contract.stack import Model, Price, ReservedCapacity, StackState, StaticMachine
from tests.contract.samples import STACK, pool

HOME, ABROAD = "us-central1", "us-east1"
ZONES = ("us-central1-a", "us-east1-b", "us-east1-c")
PRICES = {zone: Price(on_demand=3.0, spot=1.0) for zone in ZONES}
BOTH = replace(
    STACK,
    regions=(HOME, ABROAD),
    pools=(
        pool("near", zones=ZONES[:1], prices={ZONES[0]: PRICES[ZONES[0]]}),
        pool("wide", zones=ZONES, prices=PRICES, templates={"spot": "t/home", f"{ABROAD}/spot": "t/east"}),
        pool("far", zones=ZONES[1:], prices={zone: PRICES[zone] for zone in ZONES[1:]}),
        pool(
            "always",
            kind="static",
            zones=ZONES[:2],
            machines=(StaticMachine("s0", ZONES[0]), StaticMachine("s1", ZONES[1])),
            prices={zone: PRICES[zone] for zone in ZONES[:2]},
        ),
    ),
)


def spec(**over: object) -> JobSpec:
    return replace(JobSpec("first", ("/opt/train.py",)), **over)


def zones(job: JobSpec, stack: StackState = BOTH) -> dict[str, tuple[str, ...]]:
    return {found.name: found.zones for found in pools_of(job, stack)}


def test_a_job_uses_zones_of_the_home_region_only_unless_it_names_others() -> None:
    assert zones(spec()) == {"near": ZONES[:1], "wide": ZONES[:1], "always": ZONES[:1]}
    assert zones(spec(regions=(ABROAD,))) == {"wide": ZONES[1:], "far": ZONES[1:], "always": ZONES[1:2]}
    assert zones(spec(regions=(ABROAD, HOME))) == {one.name: one.zones for one in BOTH.pools}
    assert zones(spec(regions=(ABROAD,), pools=("wide",))) == {"wide": ZONES[1:]}
    assert zones(spec(regions=(ABROAD,), static="never")) == {"wide": ZONES[1:], "far": ZONES[1:]}


def test_a_mix_has_no_zone_where_one_of_its_pools_has_none_in_the_jobs_regions() -> None:
    mix = (MachineGroup("wide", 1), MachineGroup("far", 1))
    assert zones(spec(machines=mix)) == {"wide": (), "far": ()}
    assert zones(spec(machines=mix, regions=(HOME, ABROAD))) == {"wide": ZONES[1:], "far": ZONES[1:]}


def test_a_pool_within_a_region_has_its_prices_machines_and_reservations_alone() -> None:
    (found,) = named_pools(spec(pools=("always",)), BOTH)
    assert found.prices.keys() == {ZONES[0]} and [one.name for one in found.machines] == ["s0"]
    reserved = replace(BOTH.pools[1], reservations=tuple(ReservedCapacity("r", zone, 2) for zone in ZONES))
    assert [one.zone for one in reserved.only(ZONES[1:]).reservations] == list(ZONES[1:])


def test_a_stack_in_one_region_is_not_filtered_by_names_of_zones() -> None:
    alone = replace(BOTH, regions=())
    assert zones(spec(), alone) == {one.name: one.zones for one in BOTH.pools}
    assert alone.template("wide", Model.SPOT, ZONES[1]) == "t/home"


def test_each_region_has_its_template_and_none_stands_in() -> None:
    assert [BOTH.template("wide", Model.SPOT, zone) for zone in ZONES] == ["t/home", "t/east", "t/east"]
    assert BOTH.template("wide", Model.ON_DEMAND, ZONES[0]) == BOTH.template("far", Model.SPOT, ZONES[1]) == ""
    assert BOTH.template("gone", Model.SPOT, ZONES[0]) == ""


def test_a_job_file_is_told_of_regions_without_its_pools() -> None:
    def told(job: JobSpec, stack: StackState = BOTH) -> list[str]:
        return [str(found) for found in job_problems(JobContext(job, stack))]

    assert told(spec()) == told(spec(regions=(ABROAD,))) == told(spec(regions=(HOME, ABROAD), pools=("far",))) == []
    assert told(spec(regions=("us-west1",), pools=("near",))) == [
        'regions[0]: "us-west1": the stack prod is not in this region, only in us-central1, us-east1'
        " (did you mean us-east1?)",
    ], "the pools are not judged by a region that is wrong"
    assert told(spec(regions=("mars",))) == [
        'regions[0]: "mars": the stack prod is not in this region, only in us-central1, us-east1'
    ]
    assert told(spec(pools=("far",))) == [
        'pools[0]: "far": has no zone in us-central1, only in us-east1: add one of its regions to `regions`'
    ]
    assert told(spec(regions=(ABROAD,)), replace(BOTH, pools=BOTH.pools[:1])) == [
        'regions: ["us-east1"]: no pool of the stack has a zone in these regions'
    ]


def test_data_lies_in_a_region_of_the_stack() -> None:
    def told(job: JobSpec, stack: StackState = BOTH) -> list[str]:
        return [str(found) for found in job_problems(JobContext(job, stack))]

    assert told(spec(data_gb=3.0, data_region=ABROAD)) == told(spec(data_gb=3.0)) == []
    assert told(spec(data_region="us-east2")) == [
        'data_region: "us-east2": want a region of the stack: us-central1, us-east1 (did you mean us-east1?)'
    ]
    assert told(spec(data_region=ABROAD), replace(BOTH, regions=())) == [
        'data_region: "us-east1": want a region of the stack: us-central1 (did you mean us-central1?)'
    ]


def test_egress_costs_nothing_within_a_region_or_at_an_unknown_price() -> None:
    stack = replace(BOTH, egress={HOME: {ABROAD: 0.02}})
    assert stack.egress_usd(HOME, ABROAD, 50.0) == 1.0
    assert stack.egress_usd(HOME, HOME, 50.0) == stack.egress_usd(ABROAD, HOME, 50.0) == 0.0
