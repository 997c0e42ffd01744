"""A stack document that is well, for tests to break."""

from __future__ import annotations

import msgspec
from spotkeeper.spec.stack import PoolState, Price, StackState, StaticNode

ZONES = ("us-central1-a", "us-central1-b", "us-central1-c")
PRICES = {zone: Price(on_demand=3.0, spot=1.0) for zone in ZONES}


def pool(name: str, **over: object) -> PoolState:
    base = PoolState(
        name=name,
        kind="spot",
        machine_type="n2-standard-8",
        zones=ZONES,
        nproc=1,
        max_nodes=4,
        max_on_demand=2,
        disk_gb=50,
        disk_type="pd-balanced",
        prices=PRICES,
        templates={"spot": "t/spot", "on-demand": "t/od"},
    )
    return msgspec.structs.replace(base, **over)


STACK = StackState(
    stack="prod",
    cloud="gcp",
    project="my-project",
    region="us-central1",
    bucket="sk-prod",
    max_machines=5,
    pools=(
        pool("workers"),
        pool(
            "always",
            kind="static",
            max_nodes=1,
            max_on_demand=0,
            templates={},
            nodes=(StaticNode("sk-prod-always-s0", ZONES[0]),),
        ),
        pool("gpus", nproc=8, max_nodes=2, max_on_demand=0),
    ),
)
