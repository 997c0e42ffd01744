"""The bucket over HTTP: all objects for the operator, a few paths for a VM."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

import pytest
import requests

from spotkeeper.local.lifecycle.cloud import LocalCloud
from spotkeeper.reconcile.store.bucket import open_objects
from tests.local.client import Api

BUCKET = "sk-test"


@pytest.fixture(scope="module")
def bucket(cloud: LocalCloud) -> Iterator[str]:
    url = f"{cloud.endpoint}/local/v1/resources/storage:bucket"
    body = {"name": BUCKET, "properties": {"forceDestroy": True}}
    assert requests.post(url, json=body, headers=cloud.headers, timeout=10).ok
    yield BUCKET
    assert requests.delete(f"{url}/{BUCKET}", headers=cloud.headers, timeout=10).ok


def token(cloud: LocalCloud, name: str) -> dict[str, str]:
    vm = next(vm for vm in cloud.status().vms if vm.name == name)
    url = f"http://{vm.address}:{cloud.config.port}/computeMetadata/v1/instance/service-accounts/default/token"
    answer = requests.get(url, headers={"Metadata-Flavor": "Google"}, timeout=10).json()
    return {"Authorization": f"Bearer {answer['access_token']}"}


def put(cloud: LocalCloud, key: str, data: bytes, headers: dict[str, str] | None = None) -> int:
    url = f"{cloud.endpoint}/upload/storage/v1/b/{BUCKET}/o"
    query = {"uploadType": "media", "name": key}
    return requests.post(url, params=query, data=data, headers=headers or cloud.headers, timeout=10).status_code


def get(cloud: LocalCloud, key: str, headers: dict[str, str] | None = None) -> requests.Response:
    url = f"{cloud.endpoint}/storage/v1/b/{BUCKET}/o/{quote(key, safe='')}"
    return requests.get(url, params={"alt": "media"}, headers=headers or cloud.headers, timeout=10)


def test_uploads_reach_the_functions_bucket(cloud: LocalCloud, bucket: str) -> None:
    assert put(cloud, "stack/pools.json", b"{}") == 200
    blob = open_objects(cloud.bucket, None, brief=False).get("stack/pools.json")
    assert blob is not None and blob.data == b"{}"
    assert get(cloud, "stack/pools.json").content == b"{}"
    assert get(cloud, "stack/none").status_code == 404
    url = f"{cloud.endpoint}/storage/v1/b/{BUCKET}/o/stack%2Fpools.json"
    assert requests.delete(url, headers=cloud.headers, timeout=10).status_code == 204
    assert requests.delete(url, headers=cloud.headers, timeout=10).status_code == 404
    other = url.replace(BUCKET, "other-bucket")
    assert requests.get(other, params={"alt": "media"}, headers=cloud.headers, timeout=10).status_code == 404


def test_invalid_object_keys_are_refused(cloud: LocalCloud, bucket: str) -> None:
    for key in ("", "a//b", "../x", "a b"):
        assert put(cloud, key, b"x") == 400


def test_a_vm_reaches_only_its_own_paths(cloud: LocalCloud, api: Api, bucket: str) -> None:
    api.ok(api.vm("writer"))  # labelled sk-job=abcdefgh
    mine = token(cloud, "writer")
    for key in ("bundles/ab.tar", "jobs/abcdefgh/source/cd", "jobs/otherjob/source/cd", "jobs/abcdefgh/rec"):
        assert put(cloud, key, b"data") == 200
    assert get(cloud, "bundles/ab.tar", mine).content == b"data"
    assert get(cloud, "jobs/abcdefgh/source/cd", mine).status_code == 200
    assert put(cloud, "jobs/abcdefgh/logs/0/1.log", b"line", mine) == 200
    assert put(cloud, "jobs/abcdefgh/ckpt/1-5/COMMIT", b"x", mine) == 200
    assert put(cloud, "jobs/abcdefgh/out/0/model.pt", b"weights", mine) == 200
    for key in ("jobs/otherjob/source/cd", "jobs/abcdefgh/rec", "stack/allocation", "jobs/abcdefgh/source/../rec"):
        assert get(cloud, key, mine).status_code in (400, 403), key
    for key in (
        "jobs/abcdefgh/rec",
        "jobs/otherjob/logs/0/1.log",
        "jobs/otherjob/out/0.json",
        "bundles/ab.tar",
        "jobs/abcdefgh/source/cd",
    ):
        assert put(cloud, key, b"evil", mine) == 403, key
    url = f"{cloud.endpoint}/storage/v1/b/{BUCKET}/o/bundles%2Fab.tar"
    assert requests.delete(url, headers=mine, timeout=10).status_code == 403
    api.ok(api.delete("zones/us-central1-a/instances/writer"))
    assert get(cloud, "bundles/ab.tar", mine).status_code == 403  # a deleted machine's token opens nothing
    assert get(cloud, "bundles/ab.tar", {"Authorization": "Bearer nonsense"}).status_code == 401


def test_a_create_only_upload_replaces_nothing(cloud: LocalCloud, bucket: str) -> None:
    """``ifGenerationMatch=0``, as copies of checkpoints use it; other conditions are not built."""
    url = f"{cloud.endpoint}/upload/storage/v1/b/{BUCKET}/o"
    query = {"uploadType": "media", "name": "jobs/abcdefgh/ckpt/1-5/0.json", "ifGenerationMatch": "0"}
    assert requests.post(url, params=query, data=b"first", headers=cloud.headers, timeout=10).status_code == 200
    again = requests.post(url, params=query, data=b"second", headers=cloud.headers, timeout=10)
    assert (again.status_code, again.json()["error"]["errors"][0]["reason"]) == (412, "conditionNotMet")
    assert get(cloud, query["name"]).content == b"first"
    assert (
        requests.post(
            url, params=query | {"ifGenerationMatch": "7"}, data=b"x", headers=cloud.headers, timeout=10
        ).status_code
        == 501
    )


def test_a_bucket_with_objects_needs_force_destroy(cloud: LocalCloud, bucket: str) -> None:
    url = f"{cloud.endpoint}/local/v1/resources/storage:bucket/{BUCKET}"
    assert put(cloud, "stack/x", b"1") == 200
    assert requests.put(url, json={"name": BUCKET, "properties": {}}, headers=cloud.headers, timeout=10).ok
    assert requests.delete(url, headers=cloud.headers, timeout=10).status_code == 409
    assert requests.put(
        url, json={"name": BUCKET, "properties": {"forceDestroy": True}}, headers=cloud.headers, timeout=10
    ).ok
    second = {"name": "another", "properties": {}}
    assert requests.post(url.rsplit("/", 1)[0], json=second, headers=cloud.headers, timeout=10).status_code == 501
