"""A refusal for the account's quota: it says nothing about spot capacity, and the user is told what to do."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from spotkeeper.contract.ledger import Event
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.select.offers import Need, select
from spotkeeper.reconcile.store.documents import OfferHistory
from tests.reconcile.world import World, stack

SAID = "QUOTA_EXCEEDED Quota 'PREEMPTIBLE_NVIDIA_H100_GPUS' exceeded. Limit: 8.0 in region us-central1."


@pytest.mark.parametrize(
    ("cloud", "page"),
    [
        ("gcp", "https://console.cloud.google.com/iam-admin/quotas?project=p"),
        ("aws", "https://z.console.aws.amazon.com/servicequotas/home/services/ec2/quotas"),
    ],
)
def test_the_job_says_which_quota_and_where_to_raise_it(cloud: str, page: str) -> None:
    world = World(policy="spot", the_stack=replace(stack(), cloud=cloud))
    world.quota = SAID
    world.submit()
    world.run(30)
    assert world.record().reason == f"waiting for quota: {SAID}; raise it at {page}"
    assert {entry.cause for entry in world.events(Event.REFUSED) if entry.attempt} == {"quota"}
    world.quota = ""
    world.until(world.training, 300)
    assert world.record().reason == ""


def test_a_refusal_for_capacity_takes_its_place() -> None:
    world = World(policy="spot")
    world.quota = SAID
    world.submit()
    world.run(30)
    world.quota = ""
    for zone in world.stack.zones():
        world.capacity[zone, Model.SPOT] = 0
    world.run(400)
    assert world.record().reason.startswith("waiting for capacity in ")


def test_a_quota_refusal_delays_requests_and_leaves_the_zones_history() -> None:
    """Two hours after a refusal for capacity another zone still comes first, after one for quota it does not."""
    world, pools = World(), stack()
    now = 1e6

    def first(age_s: float, **refused: float) -> str:
        offer = OfferHistory("pool", "z-a", Model.SPOT, **dict.fromkeys(refused, now - age_s))
        return select(world.spec, pools, Need(now=now, market=(offer,), on_demand_left=9)).choices[0].offer.zone

    assert first(60, refused_at=1) == first(60, quota_at=1) == "z-b"
    assert first(1200, refused_at=1) == "z-b"
    assert first(1200, quota_at=1) == "z-a"
