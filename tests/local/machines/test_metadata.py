"""The metadata server, checked by google-auth and against Google's documentation."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import jwt
import pytest
import requests

from spotkeeper.local.core.views import VmView
from spotkeeper.local.lifecycle.cloud import LocalCloud
from spotkeeper_agent.cloud.gce import Gce
from spotkeeper_agent.cloud.notice import Cause
from tests.local.client import SPOT, Api

PATH = "zones/us-central1-b/instances/meta"
FLAVOR = {"Metadata-Flavor": "Google"}
EMAIL = "node@local.iam.gserviceaccount.com"


@pytest.fixture(scope="module")
def vm(cloud: LocalCloud, api: Api) -> Iterator[VmView]:
    accounts = [{"email": EMAIL, "scopes": ["https://www.googleapis.com/auth/cloud-platform"]}]
    api.ok(api.vm("meta", "us-central1-b", scheduling=SPOT, serviceAccounts=accounts))
    yield next(vm for vm in cloud.status().vms if vm.name == "meta")
    api.ok(api.delete(PATH))


@pytest.fixture(scope="module")
def host(cloud: LocalCloud, vm: VmView) -> str:
    return f"{vm.address}:{cloud.config.port}"


def read(host: str, path: str, headers: Any = FLAVOR, **query: str) -> requests.Response:
    url = f"http://{host}/computeMetadata/v1/{path}"
    return requests.get(url, params=query, headers=headers, timeout=30, allow_redirects=False)


def test_a_machines_metadata(host: str, vm: VmView) -> None:
    for path, value in {
        "instance/id": vm.id,
        "instance/name": "meta",
        "instance/zone": "projects/424242424242/zones/us-central1-b",
        "instance/hostname": "meta.us-central1-b.c.local.internal",
        "instance/preempted": "FALSE",
        "instance/maintenance-event": "NONE",
        "instance/attributes/startup-script": "sleep 1000",
        "instance/network-interfaces/0/ip": vm.address,
        "instance/service-accounts/default/email": EMAIL,
        "project/project-id": "local",
    }.items():
        answer = read(host, path)
        assert (answer.status_code, answer.text) == (200, value), path
        assert answer.headers["Metadata-Flavor"] == "Google"


def test_metadata_needs_its_header_and_refuses_proxies(host: str) -> None:
    assert read(host, "instance/id", headers={}).status_code == 403
    assert read(host, "instance/id", headers=FLAVOR | {"X-Forwarded-For": "10.0.0.1"}).status_code == 403


def test_folders_and_missing_keys(host: str) -> None:
    assert read(host, "instance/missing").status_code == 404
    assert read(host, "instance/attributes/none").status_code == 404
    assert read(host, "instance").status_code == 301
    assert "attributes/\n" in read(host, "instance/").text
    assert read(host, "instance/attributes/").text == "startup-script\n"


def test_announced_maintenance_has_a_window(host: str, cloud: LocalCloud) -> None:
    """The agent's client reads it too: the event alone has no time."""
    assert read(host, "instance/upcoming-maintenance/", recursive="true").json() == {}
    begun = cloud.clock.now()
    cloud.maintenance("meta", "TERMINATE_ON_HOST_MAINTENANCE", 3000.0)
    ended = cloud.clock.now()
    shown = read(host, "instance/upcoming-maintenance/", recursive="true").json()
    assert (shown["maintenanceStatus"], shown["canReschedule"]) == ("PENDING", "false")
    warning = Gce(cloud.clock, host).instance().warning
    assert warning is not None and warning.cause is Cause.MAINTENANCE
    assert warning.deadline is not None and begun - 1.0 <= warning.deadline - 3000.0 <= ended + 1.0
    cloud.maintenance("meta", "NONE")
    assert Gce(cloud.clock, host).instance().warning is None


def test_recursive_json_has_camel_case_keys_and_leaves_attributes_alone(host: str, vm: VmView) -> None:
    tree = read(host, "instance/", recursive="true").json()
    assert tree["networkInterfaces"][0]["ip"] == vm.address
    assert tree["maintenanceEvent"] == "NONE"
    assert str(tree["id"]) == vm.id
    assert tree["attributes"] == {"startup-script": "sleep 1000"}
    assert tree["serviceAccounts"][EMAIL]["aliases"] == ["default"]


def test_a_waiter_returns_at_its_timeout_which_is_virtual(host: str, cloud: LocalCloud) -> None:
    etag = read(host, "instance/preempted").headers["ETag"]
    began = time.monotonic()
    answer = read(host, "instance/preempted", wait_for_change="true", last_etag=etag, timeout_sec="60")
    assert answer.text == "FALSE"
    assert 0.5 <= time.monotonic() - began < 5  # 60 s at scale 100


def test_last_etag_closes_the_race_between_two_polls(host: str) -> None:
    answer = read(host, "instance/preempted", wait_for_change="true", last_etag="NONE", timeout_sec="6000")
    assert answer.text == "FALSE"  # at once, because last_etag is outdated


def test_only_a_change_of_the_requested_subtree_ends_a_wait(host: str, api: Api, cloud: LocalCloud) -> None:
    seen: dict[str, float] = {}

    def wait(path: str) -> None:
        etag = read(host, path).headers["ETag"]
        ready.wait()
        read(host, path, wait_for_change="true", last_etag=etag, timeout_sec="300", recursive="true", alt="json")
        seen[path] = time.monotonic()

    ready = threading.Barrier(3)
    waiters = [threading.Thread(target=wait, args=(path,)) for path in ("instance/attributes/", "instance/preempted")]
    for waiter in waiters:
        waiter.start()
    ready.wait()
    fingerprint = api.get(PATH)["metadata"]["fingerprint"]
    items = [{"key": "startup-script", "value": "sleep 1000"}, {"key": "new", "value": "1"}]
    api.ok(api.post(f"{PATH}/setMetadata", {"items": items, "fingerprint": fingerprint}))
    waiters[0].join(5)
    assert set(seen) == {"instance/attributes/"}
    cloud.maintenance("meta", "TERMINATE_ON_HOST_MAINTENANCE")
    assert read(host, "instance/maintenance-event").text == "TERMINATE_ON_HOST_MAINTENANCE"
    cloud.maintenance("meta", "NONE")
    waiters[1].join(0.3)
    assert waiters[1].is_alive() and set(seen) == {"instance/attributes/"}
    fingerprint = api.get(PATH)["metadata"]["fingerprint"]
    api.ok(api.post(f"{PATH}/setMetadata", {"items": items[:1], "fingerprint": fingerprint}))
    assert waiters[1].is_alive()
    waiters[1].join(10)


def test_an_identity_token_names_machine_and_audience(host: str, vm: VmView, cloud: LocalCloud) -> None:
    path = "instance/service-accounts/default/identity"
    token = read(host, path, audience="https://function.example", format="full").text
    keys = jwt.PyJWKClient(f"{cloud.endpoint}/local/v1/jwks")
    key = keys.get_signing_key_from_jwt(token).key
    later = {"verify_iat": False, "verify_exp": False}  # its times are virtual
    claims = jwt.decode(token, key, ["RS256"], audience="https://function.example", options=later)
    assert claims["iss"] == "https://accounts.google.com" and claims["email"] == EMAIL
    assert claims["exp"] - claims["iat"] == 3600
    assert abs(claims["iat"] - cloud.clock.now()) < 60
    machine = claims["google"]["compute_engine"]
    assert (machine["instance_id"], machine["instance_name"], machine["zone"]) == (vm.id, "meta", "us-central1-b")
    assert "google" not in jwt.decode(read(host, path, audience="x").text, options={"verify_signature": False})
    assert read(host, path).status_code == 400
    with pytest.raises(jwt.InvalidSignatureError):
        jwt.decode(token[:-8] + "AAAAAAAA", key, ["RS256"], audience="https://function.example", options=later)


def test_google_auth_accepts_the_metadata_server(host: str, vm: VmView, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", host)
    monkeypatch.setenv("GCE_METADATA_IP", host)
    import importlib

    import google.auth.transport.requests
    from google.auth.compute_engine import _metadata, credentials

    importlib.reload(_metadata)  # reads its address at import
    importlib.reload(credentials)
    request = google.auth.transport.requests.Request()
    assert _metadata.is_on_gce(request)
    assert _metadata.get_project_id(request) == "local"
    found = credentials.Credentials()
    found.refresh(request)
    assert found.service_account_email == EMAIL and found.token.startswith("ya29.")
    identity = credentials.IDTokenCredentials(request, "https://aud.example", use_metadata_identity_endpoint=True)
    identity.refresh(request)
    assert jwt.decode(identity.token, options={"verify_signature": False})["aud"] == "https://aud.example"


def test_a_vms_access_token_is_refused_by_the_compute_api(host: str, cloud: LocalCloud) -> None:
    token = read(host, "instance/service-accounts/default/token").json()
    assert token["expires_in"] == 3600
    url = f"{cloud.compute_endpoint}/projects/local/zones/us-central1-b/instances"
    answer = requests.get(url, headers={"Authorization": f"Bearer {token['access_token']}"}, timeout=10)
    assert answer.status_code == 403
    forged = requests.get(url, headers={"Authorization": "Bearer ya29.local.e30.e30"}, timeout=10)
    assert forged.status_code == 401


def test_each_machine_has_its_own_address(cloud: LocalCloud, api: Api, vm: VmView) -> None:
    api.ok(api.vm("other", "us-central1-b"))
    other = next(found for found in cloud.status().vms if found.name == "other")
    assert other.address != vm.address
    assert read(f"{other.address}:{cloud.config.port}", "instance/name").text == "other"
    api.ok(api.delete("zones/us-central1-b/instances/other"))
    with pytest.raises(requests.ConnectionError):
        read(f"{other.address}:{cloud.config.port}", "instance/name")
