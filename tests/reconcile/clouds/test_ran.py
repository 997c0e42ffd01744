"""When machines that are gone were on, in each cloud's own words."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from spotkeeper.contract import names
from spotkeeper.contract.cloud import MachineTimes
from spotkeeper.reconcile.clouds.ec2 import schema
from spotkeeper.reconcile.clouds.ec2.schema import InstanceIn, Placed, State, Tag
from spotkeeper.reconcile.clouds.gce import schema as gce_wire
from spotkeeper.reconcile.clouds.gce.errors import OperationErrors
from spotkeeper.reconcile.clouds.gce.schema import OperationIn

VM = "sk-prod-abcd2345-n0001-a2"
LINK = f"https://compute.googleapis.com/compute/v1/projects/p/zones/z-a/instances/{VM}"
T = 1_795_255_200.0  # 2026-11-21T10:00:00Z


def operation(kind: str, at: str, link: str = LINK, error: OperationErrors | None = None) -> OperationIn:
    return OperationIn(operation_type=kind, target_link=link, end_time=at, error=error, status="DONE")


def test_compute_engines_operations_show_start_and_end() -> None:
    """In any order, the first of the operations that end a machine is its end; each machine has its own."""
    second, later = VM.replace("n0001", "n0002"), VM.replace("n0001", "n0003")
    found = [
        operation("insert", "2026-11-21T10:00:00Z"),
        operation("delete", "2026-11-21T11:00:00Z"),
        operation("compute.instances.preempted", "2026-11-21T10:59:00Z"),
        operation("compute.instances.hostError", "2026-11-21T10:30:00Z", LINK.replace(VM, second)),
        operation("delete", "2026-11-21T10:31:00Z", LINK.replace(VM, second)),
        operation("delete", "2026-11-21T12:00:00Z", LINK.replace(VM, later)),
    ]
    expected = {
        MachineTimes(VM, "z-a", T, T + 3540.0),
        MachineTimes(second, "z-a", 0.0, T + 1800.0),
        MachineTimes(later, "z-a", 0.0, T + 7200.0),
    }
    for listed in (found, found[::-1]):
        ran = gce_wire.to_ran(listed, "prod", "z-a")
        assert len(ran) == 3 and set(ran) == expected


@pytest.mark.parametrize(
    "other",
    [
        operation("delete", ""),  # under way
        operation("delete", "2026-11-21T11:00:00Z", LINK.replace("prod", "test")),
        operation("delete", "2026-11-21T11:00:00Z", LINK.replace(VM, "by-hand")),
        operation("delete", "2026-11-21T11:00:00Z", error=OperationErrors()),
        operation("insert", "2026-11-21T10:00:00Z"),  # it runs
    ],
)
def test_other_operations_are_ignored(other: OperationIn) -> None:
    assert gce_wire.to_ran([other], "prod", "z-a") == ()


def instance(state: str = "terminated", reason: str = "") -> InstanceIn:
    tags = (Tag(names.LABEL_STACK, "prod"), Tag("Name", VM))
    return InstanceIn(
        "i-1",
        state=State(state),
        tags=tags,
        placement=Placed("us-east-1a"),
        launch_time=datetime.fromtimestamp(T, UTC),
        state_transition_reason=reason,
    )


@pytest.mark.parametrize("by", ["User", "Service"])  # a call, and an interruption
def test_ec2_reports_the_start_of_the_shutdown(by: str) -> None:
    ended = instance(reason=f"{by} initiated (2026-11-21 11:00:00 GMT)")
    assert schema.to_ran(ended, "prod") == MachineTimes(VM, "us-east-1a", T, T + 3600.0)


@pytest.mark.parametrize("reason", ["", "Server.SpotInstanceTermination", "Service initiated"])
def test_ec2_may_report_no_time(reason: str) -> None:
    assert schema.to_ran(instance(reason=reason), "prod") == MachineTimes(VM, "us-east-1a", T, 0.0)


def test_running_and_foreign_machines_have_no_end() -> None:
    assert schema.to_ran(instance("running"), "prod") is None
    assert schema.to_ran(instance(), "test") is None
