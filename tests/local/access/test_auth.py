"""The one-machine cloud's API refuses web pages, other users of the machine, and clients without its secret."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

from spotkeeper.local.access import auth, peer
from spotkeeper.local.access.auth import Principal, Tokens
from spotkeeper.local.lifecycle.cloud import LocalCloud
from tests import web
from tests.local.client import Api, eventually, vm_body

ZONE = "us-central1-a"
CHROMIUM = shutil.which("chromium")
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync",
)  # fmt: skip
PAGE_S = 60.0

# Requests of a page without a preflight (text/plain), with one (JSON, a token), under another name of this machine, and
# to a metadata server. The page reports each result to its own server.
PAGE = """<!doctype html><script>
const insert = JSON.stringify(%(body)s);
async function attempt(name, url, options) {
  try { const answer = await fetch(url, options); return [name, answer.type, answer.status, await answer.text()]; }
  catch (error) { return [name, "refused", 0, String(error)]; }
}
async function all() {
  const vms = "/compute/v1/projects/local/zones/us-central1-a/instances", json = {"Content-Type": "application/json"};
  const found = [];
  for (const root of ["%(cloud)s", "%(rebound)s"]) {
    found.push(await attempt("plain", root + vms, {method: "POST", mode: "no-cors", body: insert}));
    found.push(await attempt("json", root + vms, {method: "POST", body: insert, headers: json}));
    found.push(await attempt("token", root + vms, {method: "POST", body: insert,
                                                   headers: {...json, Authorization: "Bearer guessed"}}));
    found.push(await attempt("read", root + "/local/v1/status", {}));
    found.push(await attempt("open", root + "/local/v1/jwks", {}));
  }
  found.push(await attempt("metadata", "%(metadata)s/computeMetadata/v1/instance/name",
                           {headers: {"Metadata-Flavor": "Google"}}));
  await fetch("/told", {method: "POST", body: JSON.stringify(found)});
}
all();
</script>"""


def insert(cloud: LocalCloud, name: str, **headers: str) -> requests.Response:
    url = f"{cloud.compute_endpoint}/projects/local/zones/{ZONE}/instances"
    return requests.post(url, data=json.dumps(vm_body(name)), headers=headers, timeout=10)


def test_requests_of_a_web_page_are_refused(cloud: LocalCloud) -> None:
    """JSON as text/plain needs no preflight. Each check alone refuses it."""
    bearer, json_ = cloud.headers, {"Content-Type": "application/json"}
    host = {"Host": f"rebound.example:{cloud.config.port}"}
    for refused, headers in (
        (401, {"Content-Type": "text/plain"}),
        (401, json_),
        (401, {**json_, "Authorization": "Bearer guessed"}),
        (401, {**json_, "Authorization": f"Basic {cloud.token}"}),
        (415, {**bearer, "Content-Type": "text/plain"}),
        (415, {**bearer, "Content-Type": ""}),
        (403, {**bearer, **json_, "Origin": "https://page.example"}),
        (403, {**bearer, **json_, "Origin": cloud.endpoint}),
        (403, {**bearer, **json_, "Origin": "null"}),
        (403, {**bearer, **json_, **host}),
        (403, {**bearer, **json_, "Host": "127.0.0.1.nip.io"}),
    ):
        answer = insert(cloud, "not-made", **headers)
        assert answer.status_code == refused, (headers, answer.text)
    assert not Api.of(cloud).exists(f"zones/{ZONE}/instances/not-made")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST", "127.3.2.1", "[::1]", "127.0.0.1:80"])
def test_host_names_of_this_machine_are_accepted(cloud: LocalCloud, host: str) -> None:
    assert requests.get(f"{cloud.endpoint}/local/v1/health", headers={"Host": host}, timeout=10).ok


def test_every_other_route_needs_a_token(cloud: LocalCloud) -> None:
    calls = (
        ("GET", "/local/v1/status"), ("GET", "/local/v1/bill"), ("POST", "/local/v1/vms/any/preempt"),
        ("POST", "/local/v1/capacity"), ("POST", "/local/v1/resources/storage:bucket"),
        ("GET", f"/compute/v1/projects/local/zones/{ZONE}/instances"), ("POST", "/batch/compute/v1"),
        ("DELETE", f"/compute/v1/projects/local/zones/{ZONE}/disks/any"), ("GET", "/storage/v1/b/any/o/any"),
        ("POST", "/upload/storage/v1/b/any/o"), ("POST", "/storage/v1/b"), ("POST", "/batch"), ("GET", "/nowhere"),
    )  # fmt: skip
    for method, path in calls:
        assert requests.request(method, cloud.endpoint + path, timeout=10).status_code == 401, path
    for path in auth.OPEN:
        assert requests.get(cloud.endpoint + path, timeout=10).ok


def test_a_machines_token_cannot_administer_the_cloud(cloud: LocalCloud) -> None:
    machine = Principal("worker@local.iam.gserviceaccount.com", f"projects/local/zones/{ZONE}/instances/any")
    token, _ = Tokens(cloud.folder).access(machine, cloud.clock.now())
    headers = {"Authorization": f"Bearer {token}"}
    assert requests.get(f"{cloud.endpoint}/local/v1/status", headers=headers, timeout=10).status_code == 403
    assert requests.post(f"{cloud.endpoint}/local/v1/capacity", headers=headers, timeout=10).status_code == 403


def test_a_metadata_server_refuses_web_pages(cloud: LocalCloud, api: Api) -> None:
    with machine(cloud, api, "asked") as url:
        flavor = {"Metadata-Flavor": "Google"}
        name = f"{url}/computeMetadata/v1/instance/name"
        assert requests.get(name, headers=flavor, timeout=10).text == "asked"
        for foreign in ({"Origin": "https://page.example"}, {"Host": f"rebound.example:{cloud.config.port}"}):
            assert requests.get(name, headers={**flavor, **foreign}, timeout=10).status_code == 403


def test_only_the_owner_can_read_the_token(cloud: LocalCloud) -> None:
    path = cloud.folder / auth.OPERATOR_FILE
    assert (path.stat().st_mode & 0o777, len(cloud.token)) == (0o600, 43)
    assert cloud.folder.stat().st_mode & 0o077 == 0
    ours = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert cloud.token not in ours, "what stands on a command line is everybody's"


NOBODY = 65534
# Attempts of another user of this machine: the secret's file, a token from every metadata server, an insert with each
# token that it got or that leaked.
STRANGER = """
import encodings.idna, json, os, sys, urllib.error, urllib.request

def call(url, data=None, **headers):
    request = urllib.request.Request(url, data, headers)
    try:
        answer = urllib.request.urlopen(request, timeout=30)
        return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""

given = json.load(sys.stdin)
if given["uid"]:
    os.setgroups([])
    os.setgid(given["uid"])
    os.setuid(given["uid"])
found = {"secret": os.access(given["file"], os.R_OK), "status": [call(given["cloud"] + "/local/v1/status")[0]]}
found["tokens"], tokens = [], given["leaked"]
for server in given["servers"]:
    token = "/computeMetadata/v1/instance/service-accounts/default/token"
    status, text = call(server + token, **{"Metadata-Flavor": "Google"})
    found["tokens"].append(status)
    tokens += [json.loads(text)["access_token"]] if status == 200 else []
found["inserts"] = []
for number, token in enumerate(tokens):
    body = json.dumps({**given["body"], "name": "stranger-%d" % number}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + token}
    found["inserts"].append(call(given["insert"], body, **headers)[0])
print(json.dumps(found))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="another user of the machine is tried out by root only")
def test_other_users_of_the_machine_are_refused(cloud: LocalCloud, api: Api, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    with machine(cloud, api, "beside") as of_machine, function(cloud) as of_function:
        given = {
            "file": str(cloud.folder / auth.OPERATOR_FILE),
            "cloud": cloud.endpoint,
            "servers": [of_machine, of_function],
            "leaked": [cloud.token],
            "insert": f"{cloud.compute_endpoint}/projects/local/zones/{ZONE}/instances",
            "body": vm_body("", script=f"touch {proof}"),
        }
        assert tried(given, NOBODY) == {"secret": False, "status": [403], "tokens": [403, 403], "inserts": [403]}
        assert not any(vm.name.startswith("stranger") for vm in cloud.status().vms)
        # The operator may do all of this, so the refusals are due to the user.
        found = tried(given, os.getuid())
        assert (found["secret"], found["tokens"], found["inserts"][0]) == (True, [200, 200], 200)
        assert eventually(proof.exists)
        for vm in cloud.status().vms:
            if vm.name.startswith("stranger"):
                api.ok(api.delete(f"zones/{ZONE}/instances/{vm.name}"))


def tried(given: dict[str, Any], uid: int) -> dict[str, Any]:
    done = subprocess.run(
        ["python3", "-c", STRANGER], input=json.dumps({**given, "uid": uid}),
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_kernel_names_a_connections_owner(family: socket.AddressFamily) -> None:
    with socket.create_server(("127.9.8.7", 0)) as server, socket.socket(family) as client:
        port = server.getsockname()[1]
        try:
            client.connect(("127.9.8.7" if family == socket.AF_INET else "::ffff:127.9.8.7", port))
        except OSError as error:
            pytest.skip(f"no IPv6 here: {error}")
        accepted, _ = server.accept()
        with accepted:
            at = accepted.getpeername(), accepted.getsockname()
            assert peer.by_table(*at) == peer.owner(accepted) == os.getuid()
            client.close()
            assert (peer.by_table(*at), peer.owner(accepted)) == (None, None), "a closed socket's row names root"


@pytest.mark.skipif(
    subprocess.run(["unshare", "--user", "--map-user=65534", "true"], capture_output=True, check=False).returncode != 0,
    reason="this user may make no user namespace",
)
def test_the_overflow_user_id_is_refused() -> None:
    """In a user namespace whose only user is 65534, every other user of the machine shows as 65534 too."""
    code = (
        "import os, socket; from spotkeeper.local.access import peer\n"
        "server = socket.create_server(('127.9.8.7', 0)); client = socket.create_connection(server.getsockname())\n"
        "accepted, _ = server.accept(); at = accepted.getpeername(), accepted.getsockname()\n"
        "print(os.getuid(), peer.by_netlink(*at), peer.owner(accepted))\n"
    )
    command = ["unshare", "--user", "--map-user=65534", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["65534", "65534", "None"]


def test_a_reset_connection_has_no_owner() -> None:
    with socket.create_server(("127.9.8.7", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        with accepted:
            assert peer.owner(accepted) is None


def test_a_refused_body_is_read_before_the_connection_closes(cloud: LocalCloud) -> None:
    """``Connection: close``, as urllib sends it: closing with the body unread would reset the client."""
    head = (
        f"POST /compute/v1/none HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {1 << 20}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", cloud.config.port), timeout=30) as client:
        client.sendall(head.encode())
        client.sendall(bytes(1 << 20))
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 401 ")


def test_the_metadata_host_name_is_accepted_only_by_metadata_servers(cloud: LocalCloud, api: Api) -> None:
    host = {"Host": "metadata.google.internal", "Metadata-Flavor": "Google"}
    assert requests.get(f"{cloud.endpoint}/local/v1/health", headers=host, timeout=10).status_code == 403
    with machine(cloud, api, "named") as url:
        assert requests.get(f"{url}/computeMetadata/v1/instance/name", headers=host, timeout=10).text == "named"


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH: apt-get install chromium")
def test_a_page_in_a_real_browser_is_refused(cloud: LocalCloud, api: Api, tmp_path: Path) -> None:
    rebound = f"http://rebound.example:{cloud.config.port}"
    with (
        machine(cloud, api, "beside") as metadata,
        page(cloud, rebound, metadata) as (url, told),
        browser(url, tmp_path),
    ):
        assert told.ready.wait(PAGE_S), "the page told nothing"
    assert len(told.found) == 11
    for name, kind, status, text in told.found:
        # A page cannot read an opaque answer; the browser or the cloud refused the others.
        assert (kind, status, text if kind == "opaque" else "") in (("opaque", 0, ""), ("refused", 0, "")), (name, text)
    assert not api.exists(f"zones/{ZONE}/instances/of-a-page")


class Told:
    """The results that the page reported."""

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.found: list[tuple[str, str, int, str]] = []


@contextmanager
def machine(cloud: LocalCloud, api: Api, name: str) -> Iterator[str]:
    """A running machine; the root of its metadata server."""
    api.ok(api.vm(name))
    (vm,) = (vm for vm in cloud.status().vms if vm.name == name)
    yield f"http://{vm.address}:{cloud.config.port}"
    api.ok(api.delete(f"zones/{ZONE}/instances/{name}"))


@contextmanager
def function(cloud: LocalCloud) -> Iterator[str]:
    """A declared function; the root of its metadata server."""
    resources = f"{cloud.endpoint}/local/v1/resources"
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("main.py", "import os\ndef main(request): return os.environ['GCE_METADATA_HOST']\n")
    source = {"storageSource": {"bucket": "sk-access", "object": "main.zip"}}
    calls: list[tuple[str, str, dict[str, Any]]] = [
        ("POST", f"{resources}/storage:bucket", {"json": {"name": "sk-access", "properties": {"forceDestroy": True}}}),
        ("POST", f"{cloud.endpoint}/upload/storage/v1/b/sk-access/o?uploadType=media&name=main.zip",
         {"data": data.getvalue()}),
        ("POST", f"{resources}/cloudfunctionsv2:function",
         {"json": {"name": "sk-access", "properties": {"buildConfig": {"source": source}}}}),
    ]  # fmt: skip
    for method, url, body in calls:
        answer = requests.request(method, url, headers=cloud.headers, timeout=10, **body)
        assert answer.ok, answer.text
    url = answer.json()["outputs"]["url"]
    assert eventually(lambda: said(url), 30), "the function does not start"
    try:
        yield f"http://{said(url)}"
    finally:
        for name in ("cloudfunctionsv2:function", "storage:bucket"):
            requests.delete(f"{resources}/{name}/sk-access", headers=cloud.headers, timeout=10)


def said(url: str) -> str:
    """The answer at the URL; None while the function starts."""
    try:
        answer = requests.get(url, timeout=5)
    except requests.RequestException:
        return ""
    return answer.text if answer.ok else ""


@contextmanager
def page(cloud: LocalCloud, rebound: str, metadata: str) -> Iterator[tuple[str, Told]]:
    """A web site on another port of this machine."""
    told = Told()
    values: dict[str, Any] = {"cloud": cloud.endpoint, "rebound": rebound, "metadata": metadata}
    text = PAGE % {**values, "body": json.dumps(vm_body("of-a-page"))}

    class Handler(web.Handler):
        def do_GET(self) -> None:
            self.answer(200, text.encode(), Content_Type="text/html")

        def do_POST(self) -> None:
            told.found = json.loads(self.body())
            self.answer(200, b"")
            told.ready.set()

    with web.serving(Handler) as server:
        yield server.url, told


@contextmanager
def browser(url: str, folder: Path) -> Iterator[None]:
    """Chromium at a page, for which ``rebound.example`` is this machine, as after DNS rebinding."""
    assert CHROMIUM is not None
    names = "--host-resolver-rules=MAP rebound.example 127.0.0.1"
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            [CHROMIUM, *QUIET, f"--user-data-dir={folder / 'profile'}", names, "--remote-debugging-port=0", url],
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
