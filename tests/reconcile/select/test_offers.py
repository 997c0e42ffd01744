"""What to ask for next: orders of offers, each for a reason a reader can follow."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from spotkeeper.contract.allocation import Allocation, Grant, Tally
from spotkeeper.contract.cloud import Offer
from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.stack import Model, PoolState, Price
from spotkeeper.reconcile.decide.provisioning.offers import static_offers
from spotkeeper.reconcile.select.offers import Need, select
from spotkeeper.reconcile.select.rule import Work
from spotkeeper.reconcile.store.documents import OfferHistory, StaticHello
from tests.reconcile.world import stack

NOW = 1000.0
SPOT, ON_DEMAND = Model.SPOT, Model.ON_DEMAND


def spec(**more: object) -> JobSpec:
    return JobSpec("job", ("x",), **more)  # type: ignore[arg-type]


def need(**more: object) -> Need:
    return Need(now=NOW, **{"on_demand_left": 99, **more})  # type: ignore[arg-type]


def order(the_spec: JobSpec, the_need: Need, the_stack: object = None) -> list[tuple[str, Model]]:
    return [(c.offer.zone[-1], c.offer.model) for c in select(the_spec, the_stack or stack(), the_need).choices]  # type: ignore[arg-type]


def test_balanced_takes_the_cheapest_spot_first_and_on_demand_last() -> None:
    assert order(spec(), need()) == [
        ("a", SPOT),
        ("b", SPOT),
        ("c", SPOT),
        ("a", ON_DEMAND),
        ("b", ON_DEMAND),
        ("c", ON_DEMAND),
    ]


def test_a_gangs_zone_is_the_only_one() -> None:
    assert order(spec(), need(zone="z-b")) == [("b", SPOT), ("b", ON_DEMAND)]


def test_a_fallback_prefers_on_demand() -> None:
    assert order(spec(), need(zone="z-b", fallback=True)) == [("b", ON_DEMAND), ("b", SPOT)]


def test_an_on_demand_offer_states_its_reason() -> None:
    def why(the_spec: JobSpec, the_need: Need) -> str:
        return next(one.why for one in select(the_spec, stack(), the_need).choices if one.offer.model is ON_DEMAND)

    assert why(spec(policy="on-demand"), need()).endswith(": the job's policy"), "whether or not there is spot"
    assert why(spec(), need()).endswith(": spot is unavailable or not worth starting")
    assert why(spec(), need(fallback=True)).endswith(": on-demand fallback")


def test_offers_refused_to_this_need_are_left_out() -> None:
    assert order(spec(), need(zone="z-a", refused=frozenset({"pool/z-a/spot"}))) == [("a", ON_DEMAND)]


@pytest.mark.parametrize(("ago", "cold"), [(10.0, True), (179.0, True), (181.0, False)])
def test_offers_refused_to_others_are_cold_for_three_minutes(ago: float, cold: bool) -> None:
    seen = (OfferHistory("pool", "z-a", SPOT, refused_at=NOW - ago),)
    found = order(spec(), need(market=seen))
    assert (found[-1] == ("a", SPOT)) is cold
    assert found[:3] == [("b", SPOT), ("c", SPOT), ("a", ON_DEMAND) if cold else ("a", SPOT)]


def test_on_demand_comes_before_cold_spot() -> None:
    seen = (OfferHistory("pool", "z-a", SPOT, refused_at=NOW - 5),)
    assert order(spec(), need(zone="z-a", market=seen)) == [("a", ON_DEMAND), ("a", SPOT)]


@pytest.mark.parametrize("price", [1.0, 1.7])
def test_no_spot_at_or_above_the_on_demand_price(price: float) -> None:
    seen = (OfferHistory("pool", "z-a", SPOT, price=price),)
    assert ("a", SPOT) not in order(spec(), need(market=seen))


def test_an_observed_price_beats_the_stack_file() -> None:
    seen = (OfferHistory("pool", "z-c", SPOT, price=0.1),)
    assert order(spec(), need(market=seen))[0] == ("c", SPOT)


def test_the_order_of_each_policy() -> None:
    assert {model for _, model in order(spec(policy="spot"), need())} == {SPOT}
    assert {model for _, model in order(spec(policy="on-demand"), need())} == {ON_DEMAND}


def test_shuffle_is_fixed_per_job_and_differs_between_jobs() -> None:
    orders = {tuple(order(spec(policy="shuffle"), need(salt=f"job-{n}"))[:3]) for n in range(20)}
    assert len(orders) > 2
    again = order(spec(policy="shuffle"), need(salt="job-1"))
    assert again == order(spec(policy="shuffle"), need(salt="job-1"))


def test_on_demand_needs_permission_of_job_and_pool() -> None:
    assert {model for _, model in order(spec(), need(on_demand_left=0))} == {SPOT}
    assert {model for _, model in order(spec(), need(), stack(max_on_demand=0))} == {SPOT}


def test_the_cheapest_machine_type_comes_first() -> None:
    """Nobody knows how much more of the job the dear one does; what it saves of its own price says nothing of that."""
    big = PoolState("big", "spot", "m", ("z-a",), 8, 4, 4, 10, "pd", {"z-a": Price(on_demand=88.0, spot=10.0)})
    near = PoolState("near", "spot", "m", ("z-a",), 8, 4, 4, 10, "pd", {"z-a": Price(on_demand=1.1, spot=0.32)})
    both = replace(stack(), pools=(big, *stack().pools, near))

    def bought(**more: object) -> list[str]:
        found = select(spec(), both, need(zone="z-a", **more)).choices
        return [f"{c.offer.pool}/{c.offer.model.value}" for c in found]

    last = ["big/spot", "big/on-demand"]
    assert bought() == ["pool/spot", "near/spot", "pool/on-demand", "near/on-demand", *last]
    assert bought(fallback=True) == ["pool/on-demand", "near/on-demand", "pool/spot", "near/spot", *last]
    assert bought(max_wait_s=3600.0, since=NOW) == ["pool/spot", "near/spot"], "and is not what is waited for"
    dry = frozenset({"pool/z-a/spot", "near/z-a/spot", "pool/z-a/on-demand", "near/z-a/on-demand"})
    assert bought(refused=dry) == last


def test_a_type_missing_in_the_zone_changes_no_offer_there() -> None:
    """A gang whose disks are where only the dearer machines are would wait for spot that is there."""
    near = PoolState("near", "spot", "t4", ("z-b",), 1, 4, 4, 10, "pd", {"z-b": Price(on_demand=0.2, spot=0.1)})
    both = replace(stack(), pools=(*stack().pools, near))
    work = Work(left_h=10.0, slack_h=20.0)
    assert select(spec(), both, need(zone="z-a", work=work)).choices[0].offer.key() == "pool/z-a/spot"


def test_only_the_jobs_pools_are_offered() -> None:
    two = stack()
    other = PoolState("big", "spot", "m", ("z-a",), 8, 4, 4, 10, "pd", {"z-a": Price(on_demand=9.0, spot=3.0)})
    two = replace(two, pools=(*two.pools, other))
    found = {c.offer.pool for c in select(spec(pools=("big",)), two, need()).choices}
    assert found == {"big"}


def test_every_choice_has_its_reason_in_one_line() -> None:
    for choice in select(spec(), stack(), need()).choices:
        assert choice.offer.zone in choice.why
        assert "\n" not in choice.why


def test_static_machines_that_said_hello_in_the_right_zone() -> None:
    the_stack = stack(static=2)
    hello = StaticHello("sk-t-fix-s1", "u", "b", "z-a", NOW)
    assert [offer.machine for offer in static_offers(spec(), the_stack, (hello,), None)] == ["sk-t-fix-s1"]
    assert static_offers(spec(), the_stack, (hello,), "z-b") == ()
    assert static_offers(spec(static="never"), the_stack, (hello,), None) == ()


# -- the allocation


def offer(model: Model = SPOT, machine: str | None = None) -> Offer:
    return Offer("pool" if machine is None else "fix", "z-a", model, 1.0, machine)


def held(*resources: str) -> list[Grant]:
    return [Grant("j", n, 1, resource) for n, resource in enumerate(resources)]


def test_caps() -> None:
    the_stack = stack(max_machines=2, max_on_demand=1, static=1)
    assert Tally(held("slot:pool")).fits(the_stack, offer())
    assert not Tally(held("slot:pool", "slot:pool/on-demand")).fits(the_stack, offer())
    assert not Tally(held("slot:pool/on-demand")).fits(the_stack, offer(ON_DEMAND))
    assert Tally(held("slot:pool")).fits(the_stack, offer(ON_DEMAND))
    assert not Tally(held("machine:n0")).fits(the_stack, offer(Model.STATIC, "n0"))
    assert Tally(held("machine:n1")).fits(the_stack, offer(Model.STATIC, "n0"))
    assert not Tally([]).fits(the_stack, Offer("nowhere", "z-a", SPOT, 1.0))
    assert Tally([], {"pool": 1}).fits(the_stack, offer()), "reserved for other jobs, which do not have it yet"
    assert not Tally(held("slot:pool"), {"pool": 1}).fits(the_stack, offer())


def test_change_adds_and_drops_by_job_rank_and_attempt() -> None:
    before = Allocation(3, "n", (Grant("j", 0, 1, "slot:pool"), Grant("k", 0, 1, "slot:pool")))
    after = before.changed([Grant("j", 0, 2, "slot:pool")], [Grant("j", 0, 1, "whatever")])
    assert after.ver == 4
    assert [(g.job, g.attempt) for g in after.grants] == [("k", 1), ("j", 2)]
