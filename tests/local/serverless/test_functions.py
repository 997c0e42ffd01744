"""The function's process, its schedule, and the provider's events, each of which must be declared."""

from __future__ import annotations

import base64
import io
import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jwt
import pytest
import requests

from spotkeeper.local.core import procs
from spotkeeper.local.core.views import FunctionView
from spotkeeper.local.lifecycle.cloud import LocalCloud
from tests.local.client import SPOT, Api, eventually

SOURCE = {"bucket": "sk-fn", "object": "function/abc.zip"}
CLOCK = "clock@local.iam.gserviceaccount.com"
# Records its calls; a second file shows that the declared archive runs.
MAIN = """
import json, os, pathlib, urllib.request
import helper

def main(request):
    if request.path == "/env":
        return {name: value for name, value in os.environ.items() if name.startswith(("SPOTKEEPER", "GCE"))}
    if request.path == "/identity":
        url = f"http://{os.environ['GCE_METADATA_HOST']}/computeMetadata/v1/instance/service-accounts/default/email"
        return urllib.request.urlopen(urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})).read()
    if request.path == "/always-fails":
        return "never", 503
    if request.path == "/fail-once" and not pathlib.Path("failed").exists():
        pathlib.Path("failed").write_text("x")
        return "not now", 503
    with open("calls", "a") as file:
        call = {"path": request.path, "auth": request.headers.get("Authorization"), "body": request.get_json()}
        file.write(json.dumps(call) + chr(10))
    return helper.WORD
"""


@pytest.fixture(scope="module")
def declare(cloud: LocalCloud) -> Iterator[Any]:
    made: list[str] = []

    def post(type_: str, name: str, **properties: Any) -> Any:
        url = f"{cloud.endpoint}/local/v1/resources/{type_}"
        answer = requests.post(url, json={"name": name, "properties": properties}, headers=cloud.headers, timeout=10)
        assert answer.ok, answer.text
        made.append(f"{url}/{name}")
        return answer.json()

    yield post
    for url in reversed(made):
        requests.delete(url, headers=cloud.headers, timeout=10)


@pytest.fixture(scope="module")
def url(cloud: LocalCloud, declare: Any) -> str:
    declare("storage:bucket", "sk-fn", forceDestroy=True)
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("main.py", MAIN)
        archive.writestr("helper.py", "WORD = 'from the archive'")
    query = {"uploadType": "media", "name": "function/abc.zip"}
    upload = f"{cloud.endpoint}/upload/storage/v1/b/sk-fn/o"
    assert requests.post(upload, params=query, data=data.getvalue(), headers=cloud.headers, timeout=10).ok
    made = declare(
        "cloudfunctionsv2:function",
        "sk-test",
        location="us-central1",
        project="local",
        buildConfig={
            "entryPoint": "main",
            "source": {"storageSource": {"bucket": "sk-fn", "object": "function/abc.zip"}},
        },
        serviceConfig={
            "serviceAccountEmail": "function@local.iam.gserviceaccount.com",
            "environmentVariables": {
                "SPOTKEEPER_STACK": "test",
                "SPOTKEEPER_BUCKET": "gs://sk-fn",
                "SPOTKEEPER_AUDIENCE": "https://us-central1-local.cloudfunctions.net/sk-test",
            },
        },
    )
    found = str(made["outputs"]["url"])
    assert eventually(lambda: answers(found), 30)
    return found


def answers(url: str) -> bool:
    try:
        return requests.get(f"{url}/env", timeout=5).ok
    except requests.RequestException:
        return False


def function(cloud: LocalCloud) -> FunctionView:
    return next(iter(cloud.status().functions))


def calls(cloud: LocalCloud, path: str) -> list[Any]:
    file = cloud.folder / "functions/sk-test/calls"
    lines = file.read_text().splitlines() if file.exists() else []
    return [call for call in map(json.loads, lines) if call["path"] == path]


def check_token(cloud: LocalCloud, header: str, audience: str) -> None:
    token = header.removeprefix("Bearer ")
    key = jwt.PyJWKClient(f"{cloud.endpoint}/oauth2/v3/certs").get_signing_key_from_jwt(token).key
    options = {"verify_iat": False, "verify_exp": False}
    claims = jwt.decode(token, key, ["RS256"], audience=audience, options=options)
    assert claims["email"] == CLOCK and claims["email_verified"]


def test_the_declared_archive_runs_with_the_declared_environment(cloud: LocalCloud, url: str) -> None:
    assert requests.post(f"{url}/hello", json={}, timeout=10).text == "from the archive"
    env = requests.get(f"{url}/env", timeout=10).json()
    assert env["SPOTKEEPER_STACK"] == "test"
    assert env["SPOTKEEPER_BUCKET"] == cloud.bucket
    assert env["SPOTKEEPER_AUDIENCE"] == url  # the platform's URL is replaced by this cloud's
    assert env["SPOTKEEPER_COMPUTE_ENDPOINT"] == cloud.compute_endpoint
    assert env["SPOTKEEPER_CLOCK"] == cloud.config.clock
    assert requests.get(env["SPOTKEEPER_JWKS"], timeout=10).json()["keys"]
    assert requests.get(f"{url}/identity", timeout=10).text == "function@local.iam.gserviceaccount.com"


def test_a_dead_function_is_started_again(cloud: LocalCloud, url: str) -> None:
    before = function(cloud)
    os.kill(before.pid, 9)
    assert eventually(lambda: function(cloud).pid not in (0, before.pid) and answers(url), 30)
    assert function(cloud).restarts == before.restarts + 1
    # The workers of the first process are gone too: only one process group answers.
    mark = procs.mark(procs.FUNCTION, f"{cloud.config.uid}-sk-test")
    alive = procs.marked(mark)
    assert {function(cloud).pid} | procs.descendants(function(cloud).pid) >= alive


def test_the_schedule_ticks_every_virtual_minute_with_a_token(cloud: LocalCloud, url: str, declare: Any) -> None:
    target = {
        "uri": f"{url}/v1/tick",
        "httpMethod": "POST",
        "body": base64.b64encode(b"{}").decode(),
        "headers": {"Content-Type": "application/json"},
        "oidcToken": {"serviceAccountEmail": CLOCK, "audience": url},
    }
    began = cloud.clock.now()
    declare("cloudscheduler:job", "tick", schedule="* * * * *", httpTarget=target)
    assert eventually(lambda: len(calls(cloud, "/v1/tick")) >= 3)
    took = cloud.clock.now() - began
    assert 120 <= took < 1000
    check_token(cloud, calls(cloud, "/v1/tick")[0]["auth"], url)
    assert requests.delete(
        f"{cloud.endpoint}/local/v1/resources/cloudscheduler:job/tick", headers=cloud.headers, timeout=10
    ).ok
    count = len(calls(cloud, "/v1/tick"))
    assert not eventually(lambda: len(calls(cloud, "/v1/tick")) > count + 1, 1.5)


def test_a_function_whose_ticks_all_fail_is_restarted(cloud: LocalCloud, url: str, declare: Any) -> None:
    """A process that has leaked a resource keeps answering with errors; a platform would replace it."""
    before = function(cloud)
    declare("cloudscheduler:job", "fails", schedule="* * * * *", httpTarget={"uri": f"{url}/always-fails"})
    assert eventually(lambda: function(cloud).pid not in (0, before.pid) and answers(url), 30)
    removed = f"{cloud.endpoint}/local/v1/resources/cloudscheduler:job/fails"
    assert requests.delete(removed, headers=cloud.headers, timeout=10).ok
    assert function(cloud).restarts > before.restarts


def test_a_preemption_reaches_the_function_by_sink_topic_and_push(
    cloud: LocalCloud, api: Api, url: str, declare: Any
) -> None:
    preempted = 'protoPayload.methodName="compute.instances.preempted"'
    where = preempted + ' AND protoPayload.resourceName=~"/instances/sk-told-"'
    topic = "projects/local/topics/preempted"
    declare("pubsub:topic", "preempted")
    declare("logging:projectSink", "preempted", destination=f"pubsub.googleapis.com/{topic}", filter=where)
    push = {"pushEndpoint": f"{url}/v1/event", "oidcToken": {"serviceAccountEmail": CLOCK, "audience": url}}
    declare("pubsub:subscription", "preempted", topic="preempted", pushConfig=push)
    flaky = {"pushEndpoint": f"{url}/fail-once"}
    declare("pubsub:subscription", "flaky", topic="preempted", pushConfig=flaky)
    for name in ("sk-told-1", "other-1"):
        api.ok(api.vm(name, scheduling=SPOT))
    number = api.get("zones/us-central1-a/instances/sk-told-1")["id"]
    for name in ("sk-told-1", "other-1"):
        cloud.preempt(name, notice=False)
    assert eventually(lambda: calls(cloud, "/v1/event"))
    assert eventually(lambda: calls(cloud, "/fail-once"))  # refused once, delivered again
    call, *again = calls(cloud, "/v1/event")  # delivered at least once, and none for the other VM
    assert all(other["body"]["message"]["data"] == call["body"]["message"]["data"] for other in again)
    check_token(cloud, call["auth"], url)
    entry = json.loads(base64.b64decode(call["body"]["message"]["data"]))
    assert entry["protoPayload"]["methodName"] == "compute.instances.preempted"
    assert entry["protoPayload"]["resourceName"] == "projects/local/zones/us-central1-a/instances/sk-told-1"
    assert entry["resource"]["labels"]["instance_id"] == number


def test_unsupported_triggers_are_refused(cloud: LocalCloud, url: str) -> None:
    root = f"{cloud.endpoint}/local/v1/resources"
    target = {"httpTarget": {"uri": url}}
    for type_, properties, code, says in [
        ("sql:database", {}, 501, "sql:database"),
        ("cloudscheduler:job", {"schedule": "7 3 * * 1", **target}, 501, "7 3 * * 1"),
        ("cloudscheduler:job", {"schedule": "* * * * *"}, 400, "httpTarget"),
        ("logging:projectSink", {"destination": "x", "filter": "severity>=ERROR"}, 501, "severity"),
        ("pubsub:subscription", {"topic": "missing"}, 404, "missing"),
    ]:
        answer = requests.post(
            f"{root}/{type_}", json={"name": "bad", "properties": properties}, headers=cloud.headers, timeout=10
        )
        assert (answer.status_code, says in answer.text) == (code, True), answer.text
        assert requests.get(f"{root}/{type_}/bad", headers=cloud.headers, timeout=10).status_code == 404


def test_a_removed_function_leaves_no_process(cloud: LocalCloud, url: str) -> None:
    mark = procs.mark(procs.FUNCTION, f"{cloud.config.uid}-sk-test")
    assert procs.marked(mark)
    assert requests.delete(
        f"{cloud.endpoint}/local/v1/resources/cloudfunctionsv2:function/sk-test", headers=cloud.headers, timeout=10
    ).ok
    assert not procs.marked(mark)
    assert not answers(url)
    assert not Path(cloud.folder / "functions/sk-test").exists()
