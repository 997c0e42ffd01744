"""The bucket over Cloud Storage's JSON API, as a provider deploys it, checked against Google's schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from spotkeeper.local.lifecycle.cloud import LocalCloud
from tests import discovery

NAME = "sk-declared"
BODY = {
    "name": NAME,
    "location": "US-CENTRAL1",
    "labels": {"sk-stack": "test"},
    "iamConfiguration": {"publicAccessPrevention": "enforced", "uniformBucketLevelAccess": {"enabled": True}},
    "lifecycle": {"rule": [{"action": {"type": "AbortIncompleteMultipartUpload"}, "condition": {"age": 1}}]},
    "softDeletePolicy": {"retentionDurationSeconds": "0"},
}
READER = {"role": "roles/storage.objectViewer", "members": ["serviceAccount:vm@local.iam.gserviceaccount.com"]}


@pytest.fixture
def bucket(cloud: LocalCloud) -> Iterator[str]:
    assert call(cloud, "POST", "/storage/v1/b", BODY)["name"] == NAME
    yield NAME
    for item in call(cloud, "GET", f"/storage/v1/b/{NAME}/o").get("items", ()):
        name = item["name"].replace("/", "%2F")
        call(cloud, "DELETE", f"/storage/v1/b/{NAME}/o/{name}", generation=item["generation"])
    call(cloud, "DELETE", f"/storage/v1/b/{NAME}")


def call(cloud: LocalCloud, method: str, path: str, body: Any = None, status: int = 200, **query: str) -> Any:
    """Check an answer against Google's document, or a refusal against its envelope."""
    answer = requests.request(method, cloud.endpoint + path, json=body, params=query, headers=cloud.headers, timeout=10)
    if status >= 400:
        assert answer.status_code == status, answer.text
        discovery.validate_error(answer.json())
        return answer.json()["error"]
    assert answer.status_code == (204 if method == "DELETE" else status), answer.text
    known = discovery.match(method, path, discovery.STORAGE)
    assert known is not None, f"{method} {path}"
    found = answer.json() if answer.content else None
    discovery.validate_response(known.method_id, found, discovery.STORAGE)
    return found


def upload(cloud: LocalCloud, key: str, kind: str, data: bytes, status: int = 200, **more: str) -> Any:
    """In two parts, as Google's own clients do."""
    about = json.dumps({"bucket": NAME, "contentType": kind, **more}).encode()
    first, second = b"--x\r\nContent-Type: application/json\r\n\r\n", b"\r\n--x\r\nContent-Type: text/plain\r\n\r\n"
    body = first + about + second + data + b"\r\n--x--\r\n"
    url, query = f"{cloud.endpoint}/upload/storage/v1/b/{NAME}/o", {"uploadType": "multipart", "name": key}
    headers = {**cloud.headers, "Content-Type": "multipart/related; boundary=x"}
    answer = requests.post(url, params=query, data=body, headers=headers, timeout=10)
    assert answer.status_code == status, answer.text
    if status != 200:
        return answer.json()["error"]
    discovery.validate_response("storage.objects.insert", answer.json(), discovery.STORAGE)
    return answer.json()


def test_a_bucket_is_shown_as_it_was_declared(cloud: LocalCloud, bucket: str) -> None:
    found = call(cloud, "GET", f"/storage/v1/b/{bucket}")
    assert {key: found[key] for key in BODY} == BODY
    changed = call(cloud, "PATCH", f"/storage/v1/b/{bucket}", {"labels": {"sk-stack": "other"}})
    assert changed["labels"] == {"sk-stack": "other"} and changed["location"] == BODY["location"]
    call(cloud, "POST", "/storage/v1/b", BODY, status=409)
    call(cloud, "POST", "/storage/v1/b", {"name": "second"}, status=501)
    assert "website" in call(cloud, "PATCH", f"/storage/v1/b/{bucket}", {"website": {}}, status=501)["message"]
    call(cloud, "GET", "/storage/v1/b/nobodys", status=404)


def test_an_object_keeps_its_content_type(cloud: LocalCloud, bucket: str) -> None:
    data = b"\r\n--y\r\n\x00\xff not text\r\n"
    made = upload(cloud, "stack/pools.json", "application/json", data, storageClass="STANDARD")
    refused = upload(cloud, "stack/pools.json", "application/json", data, status=501, storageClass="NEARLINE")
    assert "storageClass" in refused["message"]
    found = call(cloud, "GET", f"/storage/v1/b/{bucket}/o/stack%2Fpools.json")
    assert found == made and found["contentType"] == "application/json" and found["size"] == str(len(data))
    url = f"{cloud.endpoint}/storage/v1/b/{bucket}/o/stack%2Fpools.json"
    assert requests.get(url, params={"alt": "media"}, headers=cloud.headers, timeout=10).content == data
    listed = call(cloud, "GET", f"/storage/v1/b/{bucket}/o", versions="true")["items"]
    assert listed == [found]
    call(cloud, "DELETE", f"/storage/v1/b/{bucket}", status=409)
    stale = str(int(found["generation"]) + 1)
    call(cloud, "DELETE", f"/storage/v1/b/{bucket}/o/stack%2Fpools.json", status=404, generation=stale)
    assert call(cloud, "GET", f"/storage/v1/b/{bucket}/anywhereCaches") == {"kind": "storage#anywhereCaches"}


def test_a_policy_change_needs_the_newest_etag(cloud: LocalCloud, bucket: str) -> None:
    path = f"/storage/v1/b/{bucket}/iam"
    first = call(cloud, "GET", path, optionsRequestedPolicyVersion="3")
    second = call(cloud, "PUT", path, {**first, "bindings": [READER]})
    assert second["bindings"] == [READER] and call(cloud, "GET", path) == second
    call(cloud, "PUT", path, {**first, "bindings": []}, status=409)
    bounded = {**READER, "condition": {"title": "logs", "expression": "true"}}
    call(cloud, "PUT", path, {**second, "bindings": [bounded]}, status=400)
    third = call(cloud, "PUT", path, {**second, "version": 3, "bindings": [bounded]})
    assert third["bindings"] == [bounded]


def test_a_deleted_subnetworks_policy_is_deleted(cloud: LocalCloud) -> None:
    root = "/compute/beta/projects/local/regions/us-central1/subnetworks"

    def compute(method: str, path: str, body: Any = None) -> Any:
        answer = requests.request(method, cloud.endpoint + path, json=body, headers=cloud.headers, timeout=10)
        assert answer.status_code == 200, answer.text
        known = discovery.match(method, path, discovery.BETA)
        assert known is not None
        discovery.validate_response(known.method_id, answer.json(), discovery.BETA)
        return answer.json()

    def made() -> None:
        body = {"name": "shared", "network": "global/networks/default", "ipCidrRange": "10.9.0.0/24"}
        ended(compute("POST", root, body))

    def ended(operation: Any) -> None:
        path = f"/compute/beta/projects/local/regions/us-central1/operations/{operation['name']}/wait"
        assert compute("POST", path)["status"] == "DONE"

    made()
    first = compute("GET", f"{root}/shared/getIamPolicy")
    compute("POST", f"{root}/shared/setIamPolicy", {"policy": {**first, "bindings": [READER]}})
    assert compute("GET", f"{root}/shared/getIamPolicy")["bindings"] == [READER]
    ended(compute("DELETE", f"{root}/shared"))
    made()
    assert compute("GET", f"{root}/shared/getIamPolicy") == first, "whoever takes the name takes no rights"
    ended(compute("DELETE", f"{root}/shared"))
