"""The Compute Engine API: Google's shapes and refusals, names per zone, idempotency by requestId."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

import pytest
import requests

from spotkeeper.local.lifecycle.cloud import LocalCloud
from tests.local.client import SPOT, Api, RefusedError, vm_body

ZONE = "us-central1-a"
INSTANCES = f"zones/{ZONE}/instances"


def refused(code: int, reason: str) -> Any:
    return pytest.raises(RefusedError, match=rf"^{code} {reason}")


def template(name: str, **properties: Any) -> dict[str, Any]:
    body = vm_body("x")
    body.pop("name")
    return {"name": name, "properties": body | {"machineType": "e2-standard-4"} | properties}


def test_places_and_types_are_listed(api: Api) -> None:
    assert [zone["name"] for zone in api.get("zones")["items"]] == [f"us-central1-{letter}" for letter in "abc"]
    assert api.get("regions/us-central1")["status"] == "UP"
    assert api.get(f"zones/{ZONE}/machineTypes/a3-highgpu-8g")["accelerators"][0]["guestAcceleratorCount"] == 8
    assert api.get(f"zones/{ZONE}/diskTypes/pd-ssd")["name"] == "pd-ssd"
    assert api.get("")["name"] == "local"


def test_an_instance_from_a_template_is_overridden_by_the_body(api: Api) -> None:
    api.ok(api.post("regions/us-central1/instanceTemplates", template("t-over", scheduling=SPOT)))
    policy = {"name": "p-over", "groupPlacementPolicy": {"collocation": "COLLOCATED"}}
    api.ok(api.post("regions/us-central1/resourcePolicies", policy))
    link = api.get("regions/us-central1/instanceTemplates/t-over")["selfLink"]
    body = {
        "name": "over",
        "labels": {"sk-job": "other"},
        "resourcePolicies": ["projects/local/regions/us-central1/resourcePolicies/p-over"],
    }
    operation = api.post(INSTANCES, body, sourceInstanceTemplate=link)
    assert operation["status"] == "PENDING"
    listed = api.get(f"{INSTANCES}/over")  # at once, long before the operation has ended
    assert listed["status"] in ("PROVISIONING", "STAGING")
    api.ok(operation)
    made = api.get(f"{INSTANCES}/over")
    assert made["status"] == "RUNNING"
    assert made["labels"] == {"sk-stack": "test", "sk-job": "other"}
    assert made["scheduling"]["provisioningModel"] == "SPOT"
    assert made["machineType"].endswith(f"/zones/{ZONE}/machineTypes/e2-standard-4")
    assert [item["key"] for item in made["metadata"]["items"]] == ["startup-script"]
    assert made["resourcePolicies"][0].endswith("/p-over")
    with refused(400, "resourceInUseByAnotherResource"):
        api.delete("regions/us-central1/resourcePolicies/p-over")
    api.ok(api.delete(f"{INSTANCES}/{made['id']}"))  # by unique id
    assert not api.exists(f"{INSTANCES}/over")
    api.ok(api.delete("regions/us-central1/resourcePolicies/p-over"))
    api.ok(api.delete("regions/us-central1/instanceTemplates/t-over"))
    with refused(404, "notFound"):
        api.post(INSTANCES, body | {"resourcePolicies": []}, sourceInstanceTemplate=link)
    with refused(400, "invalid"):  # a regional template serves its region
        api.post(INSTANCES, body, sourceInstanceTemplate=link.replace("regions/us-central1", "regions/us-east1"))


def test_a_reservation_serves_matching_vms_that_name_it_and_stays_while_one_does(api: Api, cloud: LocalCloud) -> None:
    specific = {"count": "1", "instanceProperties": {"machineType": "e2-standard-4"}}
    body = {"name": "res", "specificReservation": specific, "specificReservationRequired": True}
    path = f"zones/{ZONE}/reservations"
    api.ok(api.post(path, body))
    assert [one["status"] for one in api.get(path)["items"]] == ["READY"]
    assert api.get(f"{path}/res")["zone"].endswith(f"/zones/{ZONE}")
    with refused(501, "notImplemented"):
        api.post(path, body | {"name": "open", "specificReservationRequired": False})

    def named(vm: str, name: str = "res", **more: Any) -> dict[str, Any]:
        key = "compute.googleapis.com/reservation-name"
        uses = {"consumeReservationType": "SPECIFIC_RESERVATION", "key": key, "values": [name]}
        return vm_body(vm) | {"reservationAffinity": uses} | more

    with refused(400, "invalid"):
        api.post(INSTANCES, named("other", "none"))
    with refused(400, "invalid"):
        api.post(INSTANCES, named("spot", scheduling=SPOT))
    with refused(400, "invalid"):
        api.post(INSTANCES, named("large", machineType=f"zones/{ZONE}/machineTypes/e2-standard-8"))
    before = cloud.status().reservations
    api.ok(api.post(INSTANCES, named("first")))
    assert [(one.used, one.count) for one in (*before, *cloud.status().reservations)] == [(0, 1), (1, 1)]
    with pytest.raises(AssertionError, match="ZONE_RESOURCE_POOL_EXHAUSTED"):
        api.ok(api.post(INSTANCES, named("second")))
    with refused(400, "resourceInUseByAnotherResource"):
        api.delete(f"{path}/res")
    api.ok(api.delete(f"{INSTANCES}/first"))
    api.ok(api.delete(f"{path}/res"))
    assert not api.exists(f"{path}/res")


def test_the_same_request_id_is_the_same_operation_even_after_the_vm_is_gone(api: Api) -> None:
    key = str(uuid.uuid4())
    first = api.post(INSTANCES, vm_body("again"), requestId=key)
    again = api.post(INSTANCES, vm_body("again"), requestId=key)
    assert again["name"] == first["name"] and again["clientOperationId"] == key
    api.ok(first)
    api.ok(api.delete(f"{INSTANCES}/again"))
    late = api.post(INSTANCES, vm_body("again"), requestId=key)
    assert late["name"] == first["name"] and late["status"] == "DONE"
    assert not api.exists(f"{INSTANCES}/again")
    found = api.get(f"zones/{ZONE}/operations", filter=f'clientOperationId="{key}"')["items"]
    assert [operation["name"] for operation in found] == [first["name"]]


def test_a_request_id_is_a_nonzero_uuid_for_one_request(api: Api) -> None:
    for bad in ("00000000-0000-0000-0000-000000000000", "not-a-uuid"):
        with refused(400, "invalid"):
            api.post(INSTANCES, vm_body("zero"), requestId=bad)
    key = str(uuid.uuid4())
    api.ok(api.post(f"zones/{ZONE}/disks", {"name": "d-key", "sizeGb": "10"}, requestId=key))
    with refused(400, "invalid"):
        api.post(f"zones/{ZONE}/disks", {"name": "d-other", "sizeGb": "10"}, requestId=key)
    api.ok(api.delete(f"zones/{ZONE}/disks/d-key"))


def test_names_are_zonal(api: Api) -> None:
    for zone in ("us-central1-a", "us-central1-b"):
        api.ok(api.post(f"zones/{zone}/disks", {"name": "twin", "sizeGb": "10"}))
    with refused(409, "alreadyExists"):
        api.post("zones/us-central1-b/disks", {"name": "twin", "sizeGb": "10"})
    for zone in ("us-central1-a", "us-central1-b"):
        api.ok(api.delete(f"zones/{zone}/disks/twin"))


BAD_BODIES: list[tuple[dict[str, Any], int, str]] = [
    ({"name": "Bad_Name"}, 400, "'resource.name'"),
    ({"name": "x" * 64}, 400, "'resource.name'"),
    ({"labels": {"Upper": "x"}}, 400, "lower case"),
    ({"labels": {"a": "UPPER"}}, 400, "Label values"),
    ({"machineType": f"zones/{ZONE}/machineTypes/e2-standrad-4"}, 400, "machineType"),
    ({"networkInterfaces": [{"network": "global/networks/missing"}]}, 400, "cannot be found"),
    ({"networkInterfaces": []}, 400, "network interface"),
    ({"disks": []}, 400, "boot disk"),
    ({"disks": [{"boot": True, "initializeParams": {"diskType": "pd-fast"}}]}, 400, "does not exist"),
    ({"scheduling": SPOT | {"automaticRestart": True}}, 400, "automaticRestart"),
    ({"scheduling": SPOT | {"onHostMaintenance": "MIGRATE"}}, 400, "onHostMaintenance"),
    ({"scheduling": SPOT | {"preemptible": False}}, 400, "preemptible"),
    ({"scheduling": {"provisioningModel": "SPOTT"}}, 400, "provisioningModel"),
    ({"scheduling": {"instanceTerminationAction": "DELETE"}}, 400, "instanceTerminationAction"),
    ({"scheduling": SPOT | {"instanceTerminationAction": "HIBERNATE"}}, 400, "instanceTerminationAction"),
    ({"scheduling": SPOT | {"preemptionNoticeDuration": {"seconds": "900"}}}, 400, "preemptionNoticeDuration"),
    ({"scheduling": {"preemptionNoticeDuration": {"seconds": "30"}}}, 400, "Only for provisioningModel SPOT"),
    ({"scheduling": SPOT | {"maxRunDuration": {"seconds": "5"}}}, 400, "maxRunDuration"),
    ({"scheduling": SPOT | {"provisioning_model": "SPOT"}}, 400, 'Unknown name "provisioning_model"'),
    ({"scheduling": SPOT | {"gracefulShutdown": {"enabled": True}}}, 501, "gracefulShutdown"),
    ({"resourcePolicies": ["regions/us-central1/resourcePolicies/none"]}, 400, "cannot be found"),
    ({"disks": [{"boot": True, "initializeParams": {"diskSizeGb": "50GB"}}]}, 400, "diskSizeGb"),
    ({"labels": ["a"]}, 400, "labels"),
    ({"guestAccelerators": [{"acceleratorCount": 1}]}, 400, "live migration"),
]


@pytest.mark.parametrize(("change", "code", "says"), BAD_BODIES)
def test_requests_that_the_real_api_refuses_are_refused(api: Api, change: dict[str, Any], code: int, says: str) -> None:
    with pytest.raises(RefusedError) as refusal:
        replace(api, strict=False).post(INSTANCES, vm_body("wrong") | change)
    assert (refusal.value.code, says in refusal.value.message) == (code, True), refusal.value
    assert not api.exists(f"{INSTANCES}/wrong")


def test_explicit_nulls_and_blank_enums_are_unset(api: Api) -> None:
    nulls = {"instanceTerminationAction": "", "nodeAffinities": [None], "provisioningModel": None}
    body = vm_body("nulls") | {"scheduling": nulls, "hostname": None}
    api.ok(replace(api, strict=False).post(INSTANCES, body))
    assert api.get(f"{INSTANCES}/nulls")["scheduling"]["provisioningModel"] == "STANDARD"
    api.ok(api.delete(f"{INSTANCES}/nulls"))


def test_unsupported_requests_get_501(api: Api) -> None:
    with refused(501, "notImplemented"):
        api.get("global/addresses")
    with refused(501, "notImplemented"):
        api.post(f"{INSTANCES}/bulkInsert", {"count": "3"})
    with refused(501, "notImplemented"):
        api.get(INSTANCES, orderBy="status")


def test_missing_resources_get_googles_404(api: Api) -> None:
    with pytest.raises(RefusedError, match=r"The resource 'projects/local/zones/.*/instances/no' was not found"):
        api.get(f"{INSTANCES}/no")
    with refused(404, "notFound"):
        api.get("zones/us-east1-z/instances")
    with refused(404, "notFound"):
        api.delete(f"{INSTANCES}/123456")


def test_an_invalid_filter_is_refused(api: Api) -> None:
    with refused(400, "invalid"):
        api.get(INSTANCES, filter="labels.sk-stack")


def test_pages_are_complete_and_without_repeats(api: Api) -> None:
    names = [f"page-{number}" for number in range(7)]
    for operation in [api.post(f"zones/{ZONE}/disks", {"name": name, "sizeGb": "10"}) for name in names]:
        api.ok(operation)
    found: list[str] = []
    page = api.get(f"zones/{ZONE}/disks", maxResults="3", filter="name=page-*")
    while True:
        assert len(page["items"]) <= 3
        found += [disk["name"] for disk in page["items"]]
        if "nextPageToken" not in page:
            break
        page = api.get(f"zones/{ZONE}/disks", maxResults="3", filter="name=page-*", pageToken=page["nextPageToken"])
    assert found == names
    for name in names:
        api.delete(f"zones/{ZONE}/disks/{name}")


def test_labels_and_metadata_change_only_with_the_fingerprint_that_was_read(api: Api) -> None:
    api.ok(api.vm("finger"))
    path = f"{INSTANCES}/finger"
    read = api.get(path)
    new = {"labels": {"a": "b"}, "labelFingerprint": read["labelFingerprint"]}
    api.ok(api.post(f"{path}/setLabels", new))
    with refused(412, "conditionNotMet"):
        api.post(f"{path}/setLabels", new)
    items = [{"key": "k", "value": "v"}]
    metadata = {"items": items, "fingerprint": read["metadata"]["fingerprint"]}
    api.ok(api.post(f"{path}/setMetadata", metadata))
    with refused(412, "conditionNotMet"):
        api.post(f"{path}/setMetadata", metadata)
    assert api.get(path)["labels"] == {"a": "b"}
    assert api.get(path)["metadata"]["items"] == items
    api.ok(api.delete(path))


def test_a_network_in_use_cannot_be_deleted(api: Api) -> None:
    api.ok(api.post("global/networks", {"name": "net", "autoCreateSubnetworks": False}))
    subnet = {"name": "sub", "network": "global/networks/net", "ipCidrRange": "10.9.0.0/24"}
    api.ok(api.post("regions/us-central1/subnetworks", subnet))
    wall = {"name": "wall", "network": "global/networks/net", "allowed": [{"IPProtocol": "tcp"}]}
    api.ok(api.post("global/firewalls", wall))
    assert api.get("global/networks/net")["subnetworks"][0].endswith("/sub")
    for path in ("global/networks/net",):
        with refused(400, "resourceInUseByAnotherResource"):
            api.delete(path)
    api.ok(api.vm("on-net", networkInterfaces=[{"subnetwork": "regions/us-central1/subnetworks/sub"}]))
    with refused(400, "resourceInUseByAnotherResource"):
        api.delete("regions/us-central1/subnetworks/sub")
    api.ok(api.delete(f"{INSTANCES}/on-net"))
    for path in ("global/firewalls/wall", "regions/us-central1/subnetworks/sub", "global/networks/net"):
        api.ok(api.delete(path))


def test_an_unreachable_zone_has_a_warning(api: Api, cloud: LocalCloud) -> None:
    api.ok(api.vm("hidden"))
    cloud.partition(ZONE)
    try:
        with refused(503, "backendError"):
            api.get(INSTANCES)
        scopes = api.get("aggregated/instances")
        assert scopes["items"][f"zones/{ZONE}"]["warning"]["code"] == "UNREACHABLE"
        assert scopes["items"]["zones/us-central1-b"]["warning"]["code"] == "NO_RESULTS_ON_PAGE"
        assert scopes["unreachables"] == [f"zones/{ZONE}"]
        assert [vm.status for vm in cloud.status().vms if vm.name == "hidden"] == ["RUNNING"]  # the VM runs on
    finally:
        cloud.partition(ZONE, False)
    found = api.get("aggregated/instances", filter="name=hidden")["items"][f"zones/{ZONE}"]["instances"]
    assert [vm["name"] for vm in found] == ["hidden"]
    api.ok(api.delete(f"{INSTANCES}/hidden"))


def test_a_quota_refuses_before_there_is_an_operation(api: Api, cloud: LocalCloud) -> None:
    zone, key = "us-central1-c", str(uuid.uuid4())
    cloud.set_quota(zone, 0)
    with refused(403, "quotaExceeded"):
        api.post(f"zones/{zone}/instances", vm_body("too-many", zone), requestId=key)
    cloud.set_quota(zone, 10)
    api.ok(api.post(f"zones/{zone}/instances", vm_body("too-many", zone), requestId=key))  # the id was not used up
    api.ok(api.delete(f"zones/{zone}/instances/too-many"))


def test_a_projects_number_names_the_project(cloud: LocalCloud) -> None:
    """A bucket shows only the project's number, with which readers look up the project."""
    assert Api.of(cloud, project="424242424242").get("")["name"] == "local"


def test_the_providers_default_fields_count_as_unset(cloud: LocalCloud, api: Api) -> None:
    loose = replace(api, strict=False)
    unset = {"nodeAffinities": [None], "skipGuestOsShutdown": False, "gracefulShutdown": None}
    sent = {**SPOT, **unset, "hostErrorTimeoutSeconds": None}
    api.ok(loose.post("regions/us-central1/instanceTemplates", template("t-sent", scheduling=sent)))
    kept = api.get("regions/us-central1/instanceTemplates/t-sent")["properties"]["scheduling"]
    assert {key: kept[key] for key in SPOT} == SPOT and "nodeAffinities" not in kept
    with refused(501, "notImplemented"):
        skipping = {**SPOT, "skipGuestOsShutdown": True}
        loose.post("regions/us-central1/instanceTemplates", template("t-skip", scheduling=skipping))
    routing = {"routingMode": "REGIONAL", "deleteBgpAlwaysCompareMed": False}
    network = {"name": "n-sent", "autoCreateSubnetworks": False, "routingConfig": routing}
    api.ok(loose.post("global/networks", network))
    assert api.get("global/networks/n-sent")["routingConfig"] == {"routingMode": "REGIONAL"}
    subnetwork = {"name": "s-sent", "network": "global/networks/n-sent", "ipCidrRange": "10.8.0.0/24"}
    subnetwork |= {"secondaryIpRanges": [], "allowSubnetCidrRoutesOverlap": False}
    api.ok(loose.post("regions/us-central1/subnetworks", subnetwork))
    for path in ("regions/us-central1/subnetworks/s-sent", "global/networks/n-sent"):
        api.ok(api.delete(path))


PART = b"Content-Type: application/http\r\nContent-ID: <one>\r\n\r\n"
LIST = f"GET /compute/v1/projects/local/{INSTANCES} HTTP/1.1\r\n\r\n".encode()


def batch(cloud: LocalCloud, *parts: bytes) -> requests.Response:
    headers = cloud.headers | {"Content-Type": "multipart/mixed; boundary=cut"}
    body = b"".join(b"--cut\r\n" + part + b"\r\n" for part in parts) + b"--cut--\r\n"
    return requests.post(f"{cloud.endpoint}/batch/compute/v1", data=body, headers=headers, timeout=30)


def test_a_batch_answers_each_of_its_requests(cloud: LocalCloud) -> None:
    answer = batch(cloud, PART + LIST, PART + b"GET /compute/v1/projects/local/nowhere HTTP/1.1\r\n\r\n")
    assert answer.status_code == 200
    assert answer.text.count("HTTP/1.1 200 OK") == answer.text.count("HTTP/1.1 501 Error") == 1
    assert answer.text.count("<response-one>") == 2 and "compute#instanceList" in answer.text


@pytest.mark.parametrize(
    "part",
    [
        PART + LIST.replace(b"us-", b"\xff"),
        PART + LIST.replace(b"/compute", b"http://[/compute"),
        PART + b"GET",
        PART,
        b"Content-Type: multipart/mixed; boundary=in\r\n\r\n--in\r\n" + PART + LIST + b"\r\n--in--",
    ],
)
def test_a_bad_part_of_a_batch_is_refused(cloud: LocalCloud, part: bytes) -> None:
    answer = batch(cloud, PART + LIST, part)
    assert answer.status_code == 400 and "part of the batch" in answer.json()["error"]["message"]


def test_a_bad_start_of_a_serial_port_is_refused(api: Api) -> None:
    api.ok(api.vm("serial"))
    for start in ("x", "\u00b2", "9" * 5000):
        with refused(400, "invalid"):
            replace(api, strict=False).get(f"{INSTANCES}/serial/serialPort", start=start)


@pytest.mark.parametrize("name", ["\u00b2", "9" * 5000], ids=["superscript", "long"])
@pytest.mark.parametrize("kind", [f"zones/{ZONE}/operations", INSTANCES, "global/networks"])
def test_a_name_that_only_looks_like_an_id_is_not_found(cloud: LocalCloud, kind: str, name: str) -> None:
    url = f"{cloud.compute_endpoint}/projects/local/{kind}/{name}"
    assert requests.get(url, headers=cloud.headers, timeout=30).status_code == 404


def test_a_body_that_is_nested_too_deeply_is_refused(cloud: LocalCloud) -> None:
    url = f"{cloud.compute_endpoint}/projects/local/{INSTANCES}"
    headers = cloud.headers | {"Content-Type": "application/json"}
    answer = requests.post(url, data="[" * 200_000, headers=headers, timeout=30)
    assert (answer.status_code, answer.json()["error"]["errors"][0]["reason"]) == (400, "parseError")
