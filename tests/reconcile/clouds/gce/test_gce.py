"""The Compute Engine adapter against a scripted server: every request it sends, and every answer it is
given, passes Google's own discovery document first."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from spotkeeper.clock import Clock
from spotkeeper.contract import names
from spotkeeper.contract.cloud import (
    Action,
    AttachDisk,
    CreateDisk,
    CreateSnapshot,
    DeleteDisk,
    DeleteSnapshot,
    DeleteVm,
    DetachDisk,
    Disk,
    DiskSnapshot,
    InsertVm,
    ResultKind,
    Vm,
    VmStatus,
)
from spotkeeper.contract.stack import Model, ReservedCapacity
from spotkeeper.reconcile.clouds.gce import api
from spotkeeper.reconcile.clouds.gce.api import Api, MetadataToken, NoAnswerError
from spotkeeper.reconcile.clouds.gce.cloud import Gce, open_gce
from spotkeeper.reconcile.clouds.gce.errors import OneError, classify, parse_error
from spotkeeper.reconcile.clouds.gce.listing import of_a_page, of_all_zones
from spotkeeper.reconcile.clouds.gce.schema import STATUS, Part, disk_body, to_time
from spotkeeper.reconcile.clouds.http_client import Answer, Wire
from tests import discovery, web
from tests.module_time import replace_time
from tests.reconcile.clouds.gce.compute import (
    DISK,
    JOB,
    LINK,
    STACK,
    UID,
    VM,
    A,
    Asked,
    B,
    Google,
    Raw,
    disk,
    failed,
    instance,
    operation,
    refusal,
    scopes,
    serve,
)

INSERT = InsertVm(JOB, UID, 7, 3, "gpu", A, Model.SPOT)
IN_RESERVATION = InsertVm(JOB, UID, 7, 3, "gpu", A, Model.RESERVED, "res")
RESERVATION = {
    "consumeReservationType": "SPECIFIC_RESERVATION",
    "key": "compute.googleapis.com/reservation-name",
    "values": ["res"],
}


@pytest.fixture
def google() -> Iterator[Google]:
    with serve() as running:
        yield running


@pytest.fixture
def gce(google: Google) -> Gce:
    return open_gce(STACK, Clock(), google.endpoint)


class TestCalls:
    def test_an_insert_contains_only_name_labels_and_placement(self, google: Google, gce: Gce) -> None:
        google.script["instances.insert"] = operation()
        result = gce.perform(INSERT, 5)
        assert (result.kind, result.action) == (ResultKind.ACCEPTED, INSERT)
        (asked,) = google.asked
        assert asked.params == {"project": "p", "zone": A}
        assert asked.body == {
            "name": "sk-demo-abcd2345-n0007-a3",
            "labels": {"sk-stack": "demo", "sk-pool": "gpu", "sk-job": JOB, "sk-node": "7", "sk-attempt": "3"},
            "resourcePolicies": ["projects/p/regions/us-x1/resourcePolicies/sk-demo-gpu-a"],
        }
        assert asked.query == {
            "sourceInstanceTemplate": "projects/p/regions/us-x1/instanceTemplates/sk-demo-gpu-spot",
            "requestId": names.idempotency_key(JOB, UID, "insert", 7, 3, A),
        }
        assert "metadata" not in asked.body

    def test_a_zone_without_a_placement_policy_gets_none(self, google: Google, gce: Gce) -> None:
        google.script["instances.insert"] = operation()
        gce.perform(msgspec.structs.replace(INSERT, zone=B), 5)
        assert "resourcePolicies" not in google.asked[0].body

    def test_an_insert_into_a_reservation_names_it_and_no_placement_policy(self, google: Google) -> None:
        """It takes the template of on-demand machines, since spot machines cannot use a reservation."""
        google.script["instances.insert"] = operation()
        pool, *others = STACK.pools
        link = f"{LINK}/regions/us-x1/instanceTemplates/sk-demo-gpu-od"
        pool = msgspec.structs.replace(
            pool, templates={"on-demand": link}, reservations=(ReservedCapacity("res", A, 1),)
        )
        gce = open_gce(msgspec.structs.replace(STACK, pools=(pool, *others)), Clock(), google.endpoint)
        assert gce.perform(IN_RESERVATION, 5).kind is ResultKind.ACCEPTED
        (asked,) = google.asked
        assert asked.query["sourceInstanceTemplate"].endswith("sk-demo-gpu-od")
        assert asked.body["reservationAffinity"] == RESERVATION
        assert "resourcePolicies" not in asked.body

    @pytest.mark.parametrize(
        ("affinity", "model", "name"),
        [
            (RESERVATION, Model.RESERVED, "res"),
            ({"consumeReservationType": "ANY_RESERVATION"}, Model.ON_DEMAND, None),
        ],
    )
    def test_only_a_machine_that_names_its_reservation_is_a_reserved_one(
        self, google: Google, gce: Gce, affinity: dict[str, object], model: Model, name: str | None
    ) -> None:
        google.script["instances.aggregatedList"] = scopes(
            "instances",
            us_x1_a=[instance(scheduling={"provisioningModel": "STANDARD"}, reservationAffinity=affinity)],
            us_x1_b=[],
        )
        (vm,) = gce.list("demo").vms
        assert (vm.model, vm.reservation) == (model, name)

    @pytest.mark.parametrize("change", [{"pool": "none"}, {"model": Model.ON_DEMAND}])
    def test_a_launch_without_a_template_is_not_sent(self, google: Google, gce: Gce, change: dict[str, Any]) -> None:
        result = gce.perform(msgspec.structs.replace(INSERT, **change), 5)
        assert result.kind is ResultKind.PERMANENT and google.asked == []

    def test_an_existing_name_counts_as_created(self, google: Google, gce: Gce) -> None:
        google.script["instances.insert"] = refusal(409, "alreadyExists")
        google.script["disks.insert"] = refusal(409, "alreadyExists")
        google.script["disks.createSnapshot"] = refusal(409, "alreadyExists")
        creations: list[Action] = [
            INSERT,
            CreateDisk(JOB, UID, 7, 1, "gpu", A),
            CreateSnapshot(JOB, UID, 7, 1, A),
        ]
        assert [gce.perform(action, 5).kind for action in creations] == [ResultKind.ACCEPTED] * 3

    @pytest.mark.parametrize(
        ("there", "kind"),
        [
            (refusal(404, "notFound"), ResultKind.DEAD_KEY),
            (instance(id="9999"), ResultKind.DEAD_KEY),
            (instance(id="4242"), ResultKind.ACCEPTED),
            (refusal(503, "backendError"), ResultKind.ACCEPTED),
        ],
    )
    def test_a_replayed_key_whose_machine_is_gone_is_dead(
        self, google: Google, gce: Gce, there: dict[str, Any], kind: ResultKind
    ) -> None:
        google.script["instances.insert"] = operation(status="DONE", targetId="4242", progress=100)
        google.script["instances.get"] = dict(there)
        assert gce.perform(INSERT, 5).kind is kind

    def test_a_replayed_failure_keeps_its_kind(self, google: Google, gce: Gce) -> None:
        google.script["instances.insert"] = failed("ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", 503)
        result = gce.perform(INSERT, 5)
        assert result.kind is ResultKind.CAPACITY and "ZONE_RESOURCE_POOL_EXHAUSTED" in result.detail

    def test_disks(self, google: Google, gce: Gce) -> None:
        google.script["disks.insert"] = operation()
        google.script["disks.delete"] = operation()
        assert gce.perform(CreateDisk(JOB, UID, 7, 1, "gpu", A), 5).kind is ResultKind.ACCEPTED
        assert gce.perform(CreateDisk(JOB, UID, 7, 2, "gpu", B, snapshot=DISK), 5).kind is ResultKind.ACCEPTED
        assert gce.perform(DeleteDisk(DISK, A), 5).kind is ResultKind.ACCEPTED
        first, second, third = google.asked
        assert first.body == {
            "name": "sk-demo-abcd2345-n0007-d1",
            "sizeGb": "50",
            "type": f"projects/p/zones/{A}/diskTypes/pd-balanced",
            "labels": {"sk-stack": "demo", "sk-pool": "gpu", "sk-job": JOB, "sk-node": "7"},
        }
        assert first.query == {"requestId": names.idempotency_key(JOB, UID, "disk", 7, 1, A)}
        assert second.body["sourceSnapshot"] == f"projects/p/global/snapshots/{DISK}"
        assert third.params == {"project": "p", "zone": A, "disk": DISK}

    def test_attach_and_detach_compare_the_unique_id(self, google: Google, gce: Gce) -> None:
        """IAM conditions hold on to names: a number in the path meets none of them."""
        google.script["instances.get"] = {"id": "4242"}
        google.script["instances.attachDisk"] = operation()
        google.script["instances.detachDisk"] = operation()
        assert gce.perform(AttachDisk(DISK, VM, "4242", A), 5).kind is ResultKind.ACCEPTED
        assert gce.perform(DetachDisk(DISK, VM, "4242", A), 5).kind is ResultKind.ACCEPTED
        first, attach, second, detach = google.asked
        assert {asked.params["instance"] for asked in google.asked} == {VM}
        assert first.method == second.method == "compute.instances.get" and first.query == {"fields": "id"}
        assert attach.body == {
            "source": f"projects/p/zones/{A}/disks/{DISK}",
            "deviceName": "sk-data",
            "mode": "READ_WRITE",
            "type": "PERSISTENT",
            "autoDelete": False,
        }
        assert attach.query == {}, "a replayed failed attach would never heal, and forceAttach never"
        assert detach.query == {"deviceName": "sk-data"}

    def test_delete_compares_the_unique_id(self, google: Google, gce: Gce) -> None:
        google.script["instances.get"] = {"id": "4242"}
        google.script["instances.delete"] = operation()
        assert gce.perform(DeleteVm(VM, "4242", A), 5).kind is ResultKind.ACCEPTED
        assert google.asked[-1].params == {"project": "p", "zone": A, "instance": VM}

    @pytest.mark.parametrize(
        ("found", "kinds"),
        [
            ({"id": "17"}, (ResultKind.ACCEPTED, ResultKind.PERMANENT, ResultKind.ACCEPTED)),
            (refusal(404, "notFound"), (ResultKind.ACCEPTED, ResultKind.PERMANENT, ResultKind.ACCEPTED)),
            (refusal(503, "backendError"), (ResultKind.AMBIGUOUS,) * 3),
            (refusal(403, "forbidden"), (ResultKind.PERMANENT,) * 3),
            (Raw(200, b"<html>"), (ResultKind.AMBIGUOUS,) * 3),
        ],
    )
    def test_a_machine_with_another_unique_id_is_left_alone(
        self, google: Google, gce: Gce, found: object, kinds: tuple[ResultKind, ...]
    ) -> None:
        google.script["instances.get"] = found
        actions = (DeleteVm(VM, "4242", A), AttachDisk(DISK, VM, "4242", A), DetachDisk(DISK, VM, "4242", A))
        assert tuple(gce.perform(action, 5).kind for action in actions) == kinds
        assert {asked.method for asked in google.asked} == {"compute.instances.get"}

    def test_snapshots(self, google: Google, gce: Gce) -> None:
        google.script["disks.createSnapshot"] = operation()
        google.script["snapshots.delete"] = operation()
        assert gce.perform(CreateSnapshot(JOB, UID, 7, 1, A, 2), 5).kind is ResultKind.ACCEPTED
        assert gce.perform(DeleteSnapshot(DISK), 5).kind is ResultKind.ACCEPTED
        assert gce.perform(CreateSnapshot(JOB, UID, 7, 1, A, 2, "us-east1"), 5).kind is ResultKind.ACCEPTED
        create, delete, warm = google.asked
        assert create.params["disk"] == DISK
        copy = DISK.replace("-d1", "-d2")  # named after the disk it is for: another move's is another snapshot
        assert create.body == {"name": copy, "labels": {"sk-stack": "demo", "sk-job": JOB, "sk-node": "7"}}
        assert delete.params["snapshot"] == DISK
        assert warm.body == {**create.body, "storageLocations": ["us-east1"]}

    @pytest.mark.parametrize(
        "action", [DeleteVm(VM, "1", A), DeleteDisk(DISK, A), DeleteSnapshot(DISK), DetachDisk(DISK, VM, "1", A)]
    )
    def test_deleting_a_missing_resource_succeeds(self, google: Google, gce: Gce, action: Action) -> None:
        gone = refusal(404, "notFound")
        google.script["instances.get"] = {"id": "1"}
        for method in ("instances.delete", "disks.delete", "snapshots.delete", "instances.detachDisk"):
            google.script[method] = dict(gone)
        assert gce.perform(action, 5).kind is ResultKind.ACCEPTED

    def test_detaching_an_unattached_disk_succeeds(self, google: Google, gce: Gce) -> None:
        google.script["instances.get"] = {"id": "1"}
        google.script["instances.detachDisk"] = refusal(
            400,
            "invalid",
            "Invalid value for field 'disk': 'sk-data'. No attached disk found with device name 'sk-data'",
        )
        assert gce.perform(DetachDisk(DISK, VM, "1", A), 5).kind is ResultKind.ACCEPTED

    @pytest.mark.parametrize("body", [b"", b"<html>", b'{"name": 1}', b"\xff"])
    def test_success_without_an_operation_proves_nothing(self, google: Google, gce: Gce, body: bytes) -> None:
        google.script["instances.get"] = {"id": "1"}
        google.script["instances.attachDisk"] = Raw(200, body)
        assert gce.perform(AttachDisk(DISK, VM, "1", A), 5).kind is ResultKind.AMBIGUOUS


REFUSALS: list[tuple[dict[str, Any], ResultKind]] = [
    (refusal(503, "resource_availability", "ZONE_RESOURCE_POOL_EXHAUSTED"), ResultKind.CAPACITY),
    (refusal(503, "ZONE_RESOURCE_POOL_EXHAUSTED"), ResultKind.CAPACITY),
    (refusal(503, "backendError", details=[{"@type": "x", "reason": "stockout"}]), ResultKind.CAPACITY),
    (refusal(403, "quotaExceeded"), ResultKind.QUOTA),
    (refusal(403, "rateLimitExceeded"), ResultKind.THROTTLED),
    (refusal(403, "userRateLimitExceeded"), ResultKind.THROTTLED),
    (refusal(429, "rateLimitExceeded"), ResultKind.THROTTLED),
    (refusal(429, "tooManyRequests"), ResultKind.THROTTLED),
    (refusal(403, "concurrentOperationsQuotaExceeded"), ResultKind.THROTTLED),
    (refusal(403, "forbidden"), ResultKind.PERMANENT),
    (refusal(403, "accessNotConfigured"), ResultKind.PERMANENT),
    (refusal(400, "invalid"), ResultKind.PERMANENT),
    (refusal(400, "required"), ResultKind.PERMANENT),
    (refusal(404, "notFound", "template"), ResultKind.PERMANENT),
    (refusal(400, "resourceInUseByAnotherResource"), ResultKind.IN_USE),
    (refusal(400, "resourceNotReady"), ResultKind.IN_USE),
    (refusal(400, "operationInProgress"), ResultKind.IN_USE),
    (refusal(401, "authError"), ResultKind.AMBIGUOUS),
    (refusal(412, "conditionNotMet"), ResultKind.AMBIGUOUS),
    (refusal(500, "internalError"), ResultKind.AMBIGUOUS),
    (refusal(503, "backendError"), ResultKind.AMBIGUOUS),
    (refusal(501, "notImplemented"), ResultKind.AMBIGUOUS),
    (failed("ZONE_RESOURCE_POOL_EXHAUSTED", 503), ResultKind.CAPACITY),
    (failed("ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", 503, reason="resource_availability"), ResultKind.CAPACITY),
    (failed("UNSUPPORTED_OPERATION", 400, f"Instance '{VM}' was preempted or deleted while it was being created"),
     ResultKind.CAPACITY),
    (failed("UNSUPPORTED_OPERATION", 400, "not supported"), ResultKind.PERMANENT),
    (failed("QUOTA_EXCEEDED", 403), ResultKind.QUOTA),
    (failed("RESOURCE_IN_USE_BY_ANOTHER_RESOURCE", 400), ResultKind.IN_USE),
    (failed("RESOURCE_NOT_FOUND", 404), ResultKind.PERMANENT),
    (failed("INTERNAL_ERROR", 500), ResultKind.AMBIGUOUS),
    (failed("RATE_LIMIT_EXCEEDED", 429), ResultKind.THROTTLED),
]  # fmt: skip


class TestErrors:
    @pytest.mark.parametrize(("answer", "kind"), REFUSALS)
    def test_answers_and_operations_are_classified_alike(
        self, google: Google, gce: Gce, answer: dict[str, Any], kind: ResultKind
    ) -> None:
        google.script["instances.insert"] = json.loads(json.dumps(answer))
        result = gce.perform(INSERT, 5)
        assert result.kind is kind
        assert result.detail

    @pytest.mark.parametrize(
        ("status", "body", "kind"),
        [
            (502, b"<html><h1>Bad Gateway</h1></html>", ResultKind.AMBIGUOUS),
            (504, b"", ResultKind.AMBIGUOUS),
            (403, b"<html>proxy</html>", ResultKind.PERMANENT),
            (400, b"[1]", ResultKind.PERMANENT),
            (429, b"\xff\xfe", ResultKind.THROTTLED),
            (500, b'{"error": "text"}', ResultKind.AMBIGUOUS),
        ],
    )
    def test_proxy_errors_are_classified_by_status(self, status: int, body: bytes, kind: ResultKind) -> None:
        assert parse_error(status, body)[0] is kind

    def test_details_are_one_short_line(self) -> None:
        body = json.dumps({"error": {"code": 400, "message": "a\nb\r\n" + "x" * 9999}}).encode()
        detail = parse_error(400, body)[1]
        assert detail == ("HTTP 400 a b " + "x" * 9999)[:300]

    def test_error_reasons_come_before_the_status(self) -> None:
        assert classify(400, (OneError(code="ZONE_RESOURCE_POOL_EXHAUSTED"),)) is ResultKind.CAPACITY
        assert classify(0, (OneError(code="SOMETHING_NEW"),)) is ResultKind.PERMANENT

    def test_a_slow_server_is_cut_off_at_the_deadline(self) -> None:
        with silent_server(drip=False) as hanging, silent_server(drip=True) as dripping:
            for endpoint in (hanging, dripping):
                started = time.monotonic()
                result = open_gce(STACK, Clock(), endpoint).perform(INSERT, 0.4)
                assert result.kind is ResultKind.AMBIGUOUS
                assert time.monotonic() - started < 2.0

    def test_an_unreachable_server_is_no_answer(self) -> None:
        assert open_gce(STACK, Clock(), "http://127.0.0.1:1/compute/v1").perform(INSERT, 1).kind is ResultKind.AMBIGUOUS


class silent_server:  # noqa: N801 - reads as a context manager
    """Accepts, and then says nothing, or one header byte every 50 ms."""

    def __init__(self, drip: bool) -> None:
        import socket

        self.drip, self.done = drip, threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.thread = threading.Thread(target=self.serve, daemon=True)

    def serve(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except OSError:
            return
        with connection:
            if self.drip:
                connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
            while not self.done.wait(0.05):
                try:
                    if self.drip:
                        connection.sendall(b"x")
                except OSError:
                    return

    def __enter__(self) -> str:
        self.thread.start()
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}/compute/v1"

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.listener.close()
        self.thread.join(5)


LIMITED = {"provisioningModel": "SPOT", "preemptible": True, "maxRunDuration": {"seconds": "3600"}}


class TestListing:
    @pytest.fixture(autouse=True)
    def empty(self, google: Google) -> None:
        google.script |= {
            "instances.aggregatedList": scopes("instances", us_x1_a=[], us_x1_b=[]),
            "disks.aggregatedList": scopes("disks", us_x1_a=[], us_x1_b=[]),
            "snapshots.list": {},
            "zoneOperations.list": {},
        }

    def test_one_listing(self, google: Google, gce: Gce) -> None:
        google.script["instances.aggregatedList"] = scopes("instances", us_x1_a=[instance()], us_x1_b=[])
        google.script["disks.aggregatedList"] = scopes("disks", us_x1_a=[disk()], us_x1_b=[])
        snapshot = {"name": DISK, "status": "READY", "labels": {"sk-stack": "demo", "sk-job": JOB, "sk-node": "7"}}
        told = {"storageBytes": "37000000000"}  # int64: a string in JSON
        google.script["snapshots.list"] = {"items": [snapshot | told]}
        listing = gce.list("demo")
        assert listing.vms == (
            Vm(VM, "4242", A, VmStatus.RUNNING, "gpu", JOB, 7, 3, "10.0.0.9", (DISK,), Model.SPOT, 1795197600.0),
        )
        assert listing.disks == (Disk(DISK, A, JOB, 7, 1, (VM,), True),)
        assert listing.snapshots == (DiskSnapshot(DISK, JOB, 7, 1, True, 37.0),)
        assert listing.answered == {A, B}
        for method in ("instances.aggregatedList", "disks.aggregatedList", "snapshots.list"):
            assert [asked.query["filter"] for asked in google.of(method)] == ['labels.sk-stack = "demo"']

    def test_lists_request_only_read_fields_and_survive_a_refusal(self, google: Google, gce: Gce) -> None:
        """A mask that a cloud does not take would make every look fail, so the second question is a plain one."""
        why = {"message": "Invalid field selection boot", "domain": "global", "reason": "invalidParameter"}
        wrong = {"_status": 400, "error": {"code": 400, "message": why["message"], "errors": [why]}}
        lists = ("instances.aggregatedList", "disks.aggregatedList", "snapshots.list")
        whole = [
            scopes("instances", us_x1_a=[instance()], us_x1_b=[]),
            scopes("disks", us_x1_a=[disk()], us_x1_b=[]),
            {},
        ]
        for method, answer in zip(lists, whole, strict=True):
            google.script[method] = lambda asked, answer=answer: wrong if "fields" in asked.query else answer
        for _ in range(2):
            listing = gce.list("demo")
            assert (len(listing.vms), len(listing.disks), listing.answered) == (1, 1, {A, B})
        masked = [asked for method in lists for asked in google.of(method) if "fields" in asked.query]
        assert 1 <= len(masked) <= len(lists), "it is not tried again"
        assert masked[0].query["fields"].startswith("items")

    def test_all_pages_are_read(self, google: Google, gce: Gce) -> None:
        first = scopes("instances", us_x1_a=[instance()]) | {"nextPageToken": "t/2"}
        other = instance(name=names.vm_name("demo", JOB, 8, 1), labels=names.labels("demo", "gpu", JOB, 8, 1), id="43")
        google.script["instances.aggregatedList"] = [first, scopes("instances", us_x1_a=[other], us_x1_b=[])]
        assert {vm.node for vm in gce.list("demo").vms} == {7, 8}
        assert [asked.query.get("pageToken") for asked in google.of("instances.aggregatedList")] == [None, "t/2"]

    def test_a_static_machine_and_models(self, google: Google, gce: Gce) -> None:
        machine = instance(
            name="sk-demo-floor-s0",
            labels={"sk-stack": "demo", "sk-pool": "floor", "team": "x"},
            scheduling={"provisioningModel": "STANDARD"},
        )
        bought = instance(scheduling={"provisioningModel": "STANDARD"})
        google.script["instances.aggregatedList"] = scopes("instances", us_x1_a=[machine, bought])
        static, dynamic = gce.list("demo").vms
        assert (static.job, static.model, static.node, static.pool) == ("", Model.STATIC, 0, "floor")
        assert dynamic.model is Model.ON_DEMAND

    @pytest.mark.parametrize(
        ("more", "ends"),
        [
            ({}, None),
            ({"resourceStatus": {"scheduling": {"terminationTimestamp": "2026-11-21T12:00:00Z"}}}, 1795262400.0),
            # It runs and has not said until when yet: from its start on.
            ({"scheduling": LIMITED, "lastStartTimestamp": "2026-11-20T18:00:00Z"}, 1795201200.0),
            ({"scheduling": LIMITED}, None),  # it has not run yet
            ({"resourceStatus": {"scheduling": {"availabilityDomain": 2}, "physicalHost": "/x"}}, None),
        ],
    )
    def test_when_a_machine_of_limited_run_ends(
        self, google: Google, gce: Gce, more: dict[str, object], ends: float | None
    ) -> None:
        google.script["instances.aggregatedList"] = scopes("instances", us_x1_a=[instance(**more)], us_x1_b=[])
        (vm,) = gce.list("demo").vms
        assert vm.ends == ends
        assert (
            "resourceStatus(scheduling(terminationTimestamp))"
            in google.of("instances.aggregatedList")[0].query["fields"]
        )

    @pytest.mark.parametrize("status", STATUS)
    def test_every_status_of_googles_is_known(self, status: str) -> None:
        enum = discovery.document()["schemas"]["Instance"]["properties"]["status"]["enum"]
        assert set(enum) == set(STATUS)
        assert (STATUS[status] is VmStatus.RUNNING) == (status == "RUNNING")

    @pytest.mark.parametrize(
        "fields",
        [
            {"labels": names.labels("demo", "gpu", JOB, 7, 4)},
            {"labels": names.labels("demo", "gpu", JOB, 6, 3)},
            {"labels": names.labels("demo", "gpu", "zzzz9999", 7, 3)},
            {"labels": {"sk-stack": "demo", "sk-job": JOB}},
            {"labels": {"sk-stack": "demo", "sk-job": JOB, "sk-node": "x", "sk-attempt": "3"}},
            {"name": "other"},
        ],
    )
    def test_copied_labels_make_no_machine_of_the_stack(
        self, google: Google, gce: Gce, fields: dict[str, Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        google.script["instances.aggregatedList"] = scopes("instances", us_x1_a=[instance(**fields)])
        assert gce.list("demo").vms == ()
        why = "has labels of this stack that do not match its name: the machine is ignored"
        assert caplog.messages == [f"{fields.get('name', VM)} {why}"]

    def test_a_foreign_address_does_not_count(self, google: Google, gce: Gce, caplog: pytest.LogCaptureFixture) -> None:
        foreign = instance(networkInterfaces=[{"networkIP": "169.254.169.254"}])
        google.script["instances.aggregatedList"] = scopes("instances", us_x1_a=[foreign], us_x1_b=[])
        (seen,) = gce.list("demo").vms
        assert (seen.status, seen.address) == (VmStatus.PENDING, "")
        why = "runs, but has no address in SPOTKEEPER_ADDRESSES: it does not count as running"
        assert caplog.messages == [f"{VM} {why}"]

    def test_boot_disks_and_static_disks_are_not_listed(self, google: Google, gce: Gce) -> None:
        boot = disk(name=VM, labels={"sk-stack": "demo", "sk-pool": "gpu"})
        static = disk(name="sk-demo-floor-s0-data", labels={"sk-stack": "demo", "sk-pool": "floor"})
        foreign = disk(name=names.disk_name("demo2", JOB, 7, 1))
        making = disk(status="CREATING", users=[])
        google.script["disks.aggregatedList"] = scopes("disks", us_x1_a=[boot, static, foreign, making])
        assert gce.list("demo").disks == (Disk(DISK, A, JOB, 7, 1, (), False),)

    def test_a_zone_with_a_warning_did_not_answer(self, google: Google, gce: Gce) -> None:
        page = scopes("disks", us_x1_a=[disk()])
        page["items"][f"zones/{B}"] = {"warning": {"code": "UNREACHABLE", "message": "down"}}
        google.script["disks.aggregatedList"] = page
        listing = gce.list("demo")
        assert listing.answered == {A}
        assert len(listing.disks) == 1

    def test_unreachables_did_not_answer(self, google: Google, gce: Gce) -> None:
        page = scopes("instances", us_x1_a=[instance()]) | {
            "unreachables": [f"projects/p/zones/{B}"],
            "warning": {"code": "UNREACHABLE"},
        }
        google.script["instances.aggregatedList"] = page
        assert gce.list("demo").answered == {A}

    def test_if_the_whole_list_fails_each_zone_is_listed(self, google: Google, gce: Gce) -> None:
        google.script["instances.aggregatedList"] = refusal(503, "backendError")

        def by_zone(asked: Asked) -> dict[str, Any]:
            return {"items": [instance()]} if asked.params["zone"] == A else refusal(503, "backendError")

        google.script["instances.list"] = by_zone
        listing = gce.list("demo")
        assert listing.answered == {A}
        assert len(listing.vms) == 1

    @pytest.mark.parametrize(
        "answer",
        [
            Raw(200, b'{"items": '),
            Raw(200, b"<html>ok</html>"),
            Raw(200, b'{"items": {"zones/us-x1-a": {"instances": [{"name": 5}]}}}'),
            Raw(502, b"<html>"),
            {"warning": {"code": "PARTIAL_SUCCESS"}},
        ],
    )
    def test_an_invalid_list_proves_nothing(self, google: Google, gce: Gce, answer: Any) -> None:
        google.script["instances.aggregatedList"] = answer
        google.script["instances.list"] = answer if isinstance(answer, Raw) else lambda _: dict(answer)
        listing = gce.list("demo")
        assert listing.answered == frozenset() and listing.vms == ()

    def test_a_listing_ends_at_its_deadline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nine lists and their retries by zone must not add up: a round has other things to do."""
        monkeypatch.setattr("spotkeeper.reconcile.clouds.gce.cloud.LISTING_S", 0.6)
        monkeypatch.setattr("spotkeeper.reconcile.clouds.gce.listing.LIST_S", 0.4)
        with silent_server(drip=False) as endpoint:
            started = time.monotonic()
            assert open_gce(STACK, Clock(), endpoint).list("demo").answered == frozenset()
            assert time.monotonic() - started < 3.0

    def test_unknown_snapshots_leave_no_zone_answered(self, google: Google, gce: Gce) -> None:
        google.script["snapshots.list"] = refusal(500, "internalError")
        assert gce.list("demo").answered == frozenset()

    def test_endless_pages_end_at_the_limit(
        self, google: Google, gce: Gce, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("spotkeeper.reconcile.clouds.gce.listing.MAX_PAGES", 3)
        google.script["instances.aggregatedList"] = lambda _: scopes("instances", us_x1_a=[]) | {"nextPageToken": "x"}
        google.script["instances.list"] = lambda _: {"nextPageToken": "x"}
        assert gce.list("demo").answered == frozenset()
        assert caplog.messages == [
            "listing the instances of all zones at once failed: more than 3 pages",
            *(f"zone {zone}: listing its instances failed: more than 3 pages" for zone in (A, B)),
        ]

    def test_accepted_inserts_that_failed_are_found_by_their_key(self, google: Google, gce: Gce) -> None:
        key = names.idempotency_key(JOB, UID, "insert", 7, 3, A)
        stockout = failed("ZONE_RESOURCE_POOL_EXHAUSTED", 503) | {
            "operationType": "insert",
            "clientOperationId": key,
            "targetLink": f"{LINK}/zones/{A}/instances/{VM}",
            "insertTime": "2026-11-20T10:00:00.000-08:00",
        }
        running = dict(stockout, status="RUNNING", targetLink=f"{LINK}/zones/{A}/instances/{VM[:-1]}4")
        made_by_hand = {k: v for k, v in stockout.items() if k != "clientOperationId"}
        random_key = dict(stockout, clientOperationId="0b5e9a52-8f0c-4b3e-9f9b-0f3b9a6f2f11")
        foreign = dict(stockout, targetLink=f"{LINK}/zones/{A}/instances/other")
        other_stack = dict(stockout, targetLink=f"{LINK}/zones/{A}/instances/{VM.replace('demo', 'prod')}")
        disk_failed = dict(stockout, targetLink=f"{LINK}/zones/{A}/disks/{DISK}")
        fine = operation(operationType="insert", clientOperationId=key, targetLink=stockout["targetLink"])

        def by_zone(asked: Asked) -> dict[str, Any]:
            every = [stockout, running, made_by_hand, random_key, foreign, other_stack, disk_failed, fine]
            return {"items": every} if asked.params["zone"] == A else {}

        google.script["zoneOperations.list"] = by_zone
        first, second, third = gce.list("demo").results
        assert first.action == InsertVm(JOB, "", 7, 3, "", A, Model.SPOT)
        assert (first.kind, first.at) == (ResultKind.CAPACITY, 1795197600.0)
        assert isinstance(second.action, InsertVm) and second.action.attempt == 4
        assert isinstance(third.action, CreateDisk) and third.action.number == 1

    def test_failures_of_this_processs_requests_are_complete(self, google: Google, gce: Gce) -> None:
        google.script["instances.insert"] = operation()
        gce.perform(INSERT, 5)
        key = google.asked[0].query["requestId"]
        link = f"{LINK}/zones/{A}/instances/{VM}"
        stockout = failed("ZONE_RESOURCE_POOL_EXHAUSTED", 503) | {"clientOperationId": key, "targetLink": link}
        google.script["zoneOperations.list"] = lambda asked: {"items": [stockout]} if asked.params["zone"] == A else {}
        (result,) = gce.list("demo").results
        assert result.action == INSERT

    def test_the_newest_requests_of_this_process_are_remembered(
        self, google: Google, gce: Gce, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("spotkeeper.reconcile.clouds.gce.actions.REMEMBERED", 2)
        google.script["instances.insert"] = google.script["disks.insert"] = lambda _: operation()
        retried = msgspec.structs.replace(INSERT, attempt=4)
        creations: tuple[Action, ...] = (INSERT, retried, CreateDisk(JOB, UID, 7, 1, "gpu", A))
        for action in creations:
            gce.perform(action, 5)
        links = [f"{LINK}/zones/{A}/{end}" for end in (f"instances/{VM}", f"instances/{VM[:-1]}4", f"disks/{DISK}")]
        failures = [
            failed("ZONE_RESOURCE_POOL_EXHAUSTED", 503)
            | {"clientOperationId": asked.query["requestId"], "targetLink": link}
            for asked, link in zip(google.asked, links, strict=True)
        ]
        google.script["zoneOperations.list"] = lambda asked: {"items": failures} if asked.params["zone"] == A else {}
        forgotten = msgspec.structs.replace(INSERT, uid="", pool="")
        assert [result.action for result in gce.list("demo").results] == [forgotten, *creations[1:]]

    def test_a_failed_list_of_operations_stops_nothing(
        self, google: Google, gce: Gce, caplog: pytest.LogCaptureFixture
    ) -> None:
        google.script["zoneOperations.list"] = lambda _: refusal(403, "forbidden")
        listing = gce.list("demo")
        assert listing.answered == {A, B} and listing.results == ()
        assert sorted(line.partition(" failed: ")[0] for line in caplog.messages) == [
            f"zone {zone}: listing its operations" for zone in (A, B)
        ]


class Within(Part, frozen=True):
    some_value: str = ""
    deeper: Whole | None = None


class Whole(Part, frozen=True):
    last: int = 0


class Listed(Part, frozen=True):
    name: str
    by_name: dict[str, str]
    one: Within = Within()
    several: tuple[Within, ...] = ()
    plain: tuple[str, ...] = ()


def test_lists_request_the_fields_of_their_type_at_every_depth() -> None:
    within = "someValue,deeper(last)"
    fields = f"name,byName,one({within}),several({within}),plain"
    more = "nextPageToken,warning/code"
    assert of_a_page(Listed) == f"items({fields}),{more}"
    assert of_all_zones("disks", Listed) == f"items/*/disks({fields}),items/*/warning/code,unreachables,{more}"


class TestWire:
    def test_a_kept_connection_that_was_closed_is_replaced_once(self, google: Google) -> None:
        api = Api(google.endpoint, None)
        google.script["instances.get"] = lambda _: instance()
        path = f"projects/p/zones/{A}/instances/{VM}"
        assert api.call("GET", path, 5).status == 200
        (kept,) = api._wire._idle
        assert kept.sock is not None
        kept.sock.shutdown(2)
        assert api.call("GET", path, 5).status == 200
        assert len(google.asked) == 2

    def test_connections_are_kept_and_used_again(self, google: Google) -> None:
        api = Api(google.endpoint, None)
        google.script["instances.get"] = lambda _: instance()
        for _ in range(3):
            api.call("GET", f"projects/p/zones/{A}/instances/{VM}", 5)
        assert len(api._wire._idle) == 1

    @pytest.mark.parametrize("endpoint", ["http://10.0.0.1/compute/v1", "http://example.com", "http://2130706433"])
    def test_a_token_is_never_sent_over_plain_http(self, endpoint: str) -> None:
        with pytest.raises(ValueError, match="plain http is allowed only to this machine") as refused:
            Api(endpoint, None)
        assert str(refused.value).startswith(f"SPOTKEEPER_COMPUTE_ENDPOINT={endpoint!r}: ")

    @pytest.mark.parametrize("endpoint", ["", "ftp://x", "//x", "https://", "https://me@x", "https://x:0"])
    def test_another_endpoint_is_refused_with_the_right_form(self, endpoint: str) -> None:
        with pytest.raises(ValueError, match="COMPUTE_ENDPOINT") as refused:
            Api(endpoint, None)
        assert str(refused.value) == f"SPOTKEEPER_COMPUTE_ENDPOINT={endpoint!r}: want https://host/compute/v1"

    @pytest.mark.parametrize(
        "endpoint", ["http://127.0.0.7:9/x", "http://localhost", "http://[::1]:8/", "https://c.example/v1"]
    )
    def test_loopback_and_https_are_accepted(self, endpoint: str) -> None:
        Api(endpoint, None)

    def test_times(self) -> None:
        assert to_time("2026-11-20T18:00:00Z") == 1795197600.0
        assert to_time("") == to_time("yesterday") == 0.0


class Metadata:
    """A metadata server that hands out numbered tokens."""

    def __init__(self) -> None:
        outer = self
        self.given = 0
        self.body: bytes | None = None
        self.status = 200

        class Handler(web.Handler):
            def do_GET(self) -> None:
                assert self.headers["Metadata-Flavor"] == "Google"
                outer.given += 1
                reply = {"access_token": f"t{outer.given}", "expires_in": 3600, "token_type": "Bearer"}
                self.answer(outer.status, json.dumps(reply).encode() if outer.body is None else outer.body)

        self.server = web.Server(Handler)
        self.host = self.server.address


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    server = Metadata()
    yield server
    server.server.close()


class TestToken:
    def test_a_token_is_cached_until_a_minute_before_its_expiry(self, metadata: Metadata) -> None:
        now = [1000.0]

        class At(Clock):
            def now(self) -> float:
                return now[0]

        token = MetadataToken(At(), metadata.host)
        assert [token(5), token(5)] == ["t1", "t1"]
        now[0] = 1000 + 3600 - 61
        assert token(5) == "t1"
        now[0] = 1000 + 3600 - 59
        assert token(5) == "t2"

    def test_a_refused_token_is_replaced_and_the_call_is_left_to_the_next_round(
        self, google: Google, metadata: Metadata
    ) -> None:
        gce = Gce(STACK, Api(google.endpoint, MetadataToken(Clock(), metadata.host)), Clock())
        google.script["instances.insert"] = [refusal(401, "authError"), operation()]
        assert gce.perform(INSERT, 5).kind is ResultKind.AMBIGUOUS
        assert gce.perform(INSERT, 5).kind is ResultKind.ACCEPTED
        assert [asked.headers["Authorization"] for asked in google.asked] == ["Bearer t1", "Bearer t2"]

    @pytest.mark.parametrize(
        ("status", "body", "why"),
        [
            (200, b"{}", "the answer is not a token: Object missing required field `access_token`"),
            (200, b"<html>", "the answer is not a token: JSON is malformed: invalid character (byte 0)"),
            (404, b"", "HTTP 404 for an access token"),
            (500, b"", "HTTP 500 for an access token"),
        ],
    )
    def test_no_token_is_no_answer(self, metadata: Metadata, status: int, body: bytes, why: str) -> None:
        metadata.status, metadata.body = status, body
        with pytest.raises(NoAnswerError) as refused:
            MetadataToken(Clock(), metadata.host)(5)
        assert str(refused.value) == f"metadata server {metadata.host}: {why}"
        gce = Gce(STACK, Api("http://127.0.0.1:1", MetadataToken(Clock(), metadata.host)), Clock())
        assert gce.perform(INSERT, 5).kind is ResultKind.AMBIGUOUS

    @pytest.mark.parametrize(("left_s", "given_s"), [(-1.0, 0.001), (0.0, 0.001), (3.0, 3.0), (60.0, 5.0)])
    def test_a_fetch_takes_the_calls_remaining_time_and_at_most_5_s(
        self, monkeypatch: pytest.MonkeyPatch, left_s: float, given_s: float
    ) -> None:
        given: list[float] = []

        def call(*args: Any) -> Answer:
            given.append(args[-1])
            return Answer(200, b'{"access_token": "t", "expires_in": 3600}')

        monkeypatch.setattr(Wire, "call", call)
        replace_time(monkeypatch, api, monotonic=lambda: 50.0)
        assert MetadataToken(Clock(), "here")(left_s) == "t"
        assert given == [given_s]

    def test_the_host_is_a_setting(self, metadata: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GCE_METADATA_HOST", metadata.host)
        assert MetadataToken(Clock())(5) == "t1"


def test_a_disk_has_its_pools_iops_and_throughput() -> None:
    """Whole numbers are texts there, like every number of 64 bits; a pool that says nothing sends nothing."""
    pool = STACK.pools[0]
    fast = msgspec.structs.replace(pool, disk_type="hyperdisk-balanced", disk_iops=6000, disk_mbps=500)
    action = CreateDisk(JOB, UID, 0, 1, pool.name, A)
    body = disk_body(STACK, fast, action)
    discovery.validate_request("compute.disks.insert", body)
    assert (body["provisionedIops"], body["provisionedThroughput"]) == ("6000", "500")
    assert not {"provisionedIops", "provisionedThroughput"} & disk_body(STACK, pool, action).keys()
