"""Secrets are planted everywhere on a whole stack, and everything that is written down is searched for them.

A job holds one in a variable and one in its source; requests carry them in headers, bodies and paths; and every
token that this cloud signs begins alike. They may be where they are needed (the job's spec and source, the
node's own folder), and nowhere else: no log, record, ledger, fact, argv, machine's metadata or status.
"""

from __future__ import annotations

import http.client
import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from spotkeeper.contract.record import Outcome
from tests.lifecycle.stage import Run, Stage, script

pytestmark = pytest.mark.lifecycle

VARIABLE, SOURCE, SENT = "kanarie-in-a-variable-81", "kanarie-in-the-source-82", "kanarie-in-a-request-83"
TOKEN = re.compile(rb"eyJ[-A-Za-z0-9_]{8,}\.eyJ|ya29\.local\.[-\w]|PRIVATE KEY")
JOB = f"""
import os, pathlib, time
held = "{SOURCE}"
assert os.environ["PLANTED"]
pathlib.Path(os.environ["UP"]).touch()
while not pathlib.Path(os.environ["GO"]).exists():
    time.sleep(0.05)
"""
# Where it belongs: the bucket, searched object by object below; and the node's folder, which is the job's.
OWN = re.compile(r"(bucket\.sqlite.*|vms/.*/(agent\.json|src/.*)|.*\.pem|secret)\Z")


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    made = Stage.set_up(tmp_path_factory.mktemp("canary"))
    try:
        yield made
    finally:
        made.tear_down()


def requests_with_secrets(url: str) -> None:
    """What a stranger may send; nothing of it is to be seen again."""
    host = url.removeprefix("http://")
    for path, headers, body in (
        ("/v1/sync", {"Authorization": f"Bearer {SENT}.{SENT}.{SENT}"}, b"{}"),
        ("/v1/tick", {"Authorization": SENT, "X-Serverless-Authorization": f"Bearer {SENT}"}, SENT.encode()),
        (f"/v1/{SENT}?{SENT}={SENT}", {"Cookie": SENT, "X-Amz-Security-Token": SENT}, SENT.encode()),
        ("/v1/sync", {"Content-Encoding": SENT, "User-Agent": SENT}, SENT.encode()),
    ):
        connection = http.client.HTTPConnection(host, timeout=20)
        connection.request("POST", path, body, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        assert answer.status in (401, 404, 415)
        assert SENT.encode() not in answer.read()
        connection.close()


def secrets_in(data: bytes) -> list[str]:
    found = [one for one in (VARIABLE, SOURCE, SENT) if one.encode() in data]
    return found + (["a token or key"] if TOKEN.search(data) else [])


def files_with_secrets(folder: Path) -> dict[str, list[str]]:
    """Of everything a cloud has written, but the job's own places."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and not path.is_symlink() and not OWN.match(name) and (held := secrets_in(path.read_bytes())):
            found[name] = held
    return found


def objects_with_secrets(stage: Stage, job: str) -> dict[str, list[str]]:
    own = (f"jobs/{job}/spec.json", f"jobs/{job}/source/", "bundles/", "function/")
    found = {}
    for key in stage.store.list(""):
        if not key.startswith(own) and (held := secrets_in(key.encode() + b" " + (stage.store.get(key) or b""))):
            found[key] = held
    return found


def processes_with_secrets() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue  # it has ended
        if path.parent.name != str(os.getpid()) and secrets_in(line):
            found.append(line.replace(b"\0", b" ").decode("utf-8", "replace"))
    return found


def test_no_planted_secret_appears_anywhere(stage: Stage, tmp_path: Path) -> None:
    up, go = tmp_path / "up", tmp_path / "go"
    spec, source = script(tmp_path, "canary", JOB, env={"PLANTED": VARIABLE, "UP": str(up), "GO": str(go)})
    (function,) = stage.cloud.status().functions
    with Run(stage, spec, source) as run:
        run.until("the job to run", up.exists)
        requests_with_secrets(function.url)
        assert processes_with_secrets() == []
        assert files_with_secrets(stage.cloud.folder) == {}, "metadata, operations and logs of a running job"
        assert secrets_in(msgspec.json.encode(run.view())) == []
        go.touch()
        assert run.over().outcome is Outcome.SUCCEEDED
        assert files_with_secrets(stage.cloud.folder) == {}
        assert objects_with_secrets(stage, run.job) == {}
        assert secrets_in(msgspec.json.encode(run.view())) == []
        logs = b"".join(path.read_bytes() for path in (stage.cloud.folder / "serial").glob("*.log"))
        assert logs and b'"status"' in logs, "the function's log was among them"


def test_the_search_finds_a_planted_secret(tmp_path: Path) -> None:
    (tmp_path / "serial").mkdir()
    (tmp_path / "serial" / "x.log").write_text(f"env PLANTED={VARIABLE}")
    (tmp_path / "state").write_text("Bearer eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJ4In0.sig")
    assert files_with_secrets(tmp_path) == {"serial/x.log": [VARIABLE], "state": ["a token or key"]}
