"""A stack document that is well, for tests to break."""

from __future__ import annotations

from pathlib import Path

import msgspec

from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.notification import ChannelState
from spotkeeper.contract.parse.check import job_problems
from spotkeeper.contract.parse.check_run import JobContext
from spotkeeper.contract.parse.problem import SpecError
from spotkeeper.contract.stack import PoolState, Price, StackState, StaticMachine

ZONES = ("us-central1-a", "us-central1-b", "us-central1-c")
PRICES = {zone: Price(on_demand=3.0, spot=1.0) for zone in ZONES}


def pool(name: str, **over: object) -> PoolState:
    base = PoolState(
        name=name,
        kind="spot",
        machine_type="n2-standard-8",
        zones=ZONES,
        nproc=1,
        max_machines=4,
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
    channels=(ChannelState("ml-team", "slack"),),
    pools=(
        pool("workers"),
        pool(
            "always",
            kind="static",
            max_machines=1,
            max_on_demand=0,
            templates={},
            machines=(StaticMachine("sk-prod-always-s0", ZONES[0]),),
        ),
        pool("gpus", nproc=8, max_machines=2, max_on_demand=0),
    ),
)


def check_job(
    spec: JobSpec, stack: StackState | None = None, *, folder: Path | None = None, now: float | None = None
) -> JobSpec:
    """``spec`` itself. Raises SpecError: everything that is wrong with it."""
    if problems := job_problems(JobContext(spec, stack, folder, now)):
        raise SpecError(problems)
    return spec
