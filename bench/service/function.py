"""Cold start of the function: time to import all that a request needs, and memory while it serves.

Fresh interpreters, and a real ``functions-framework`` process that has answered a signed request. The import time is
the least of several, because other load on the machine only adds.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from spotkeeper.contract.stack import StackState
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.store import open_store
from tests.reconcile.service import identities as ids

GOAL_IMPORT_S, GOAL_MB = 0.4, 100.0
TIMES = 7
# The framework, the HTTP interface, and late imports of the first sync and the first round.
MODULES = (
    "functions_framework",
    "spotkeeper.reconcile.service.http",
    "spotkeeper.reconcile.service.auth",
    "spotkeeper.reconcile.store.store",
    "spotkeeper.reconcile.store.objects_obstore",
    "spotkeeper.reconcile.controller.intake",
    "spotkeeper.reconcile.controller.document",
    "spotkeeper.reconcile.controller.reconcile_job",
    "spotkeeper.reconcile.controller.tick",
    "spotkeeper.reconcile.clouds.gce.cloud",
    "jwt",
)
SDK = "google.cloud.compute_v1"  # the HTTP interface does without it; measured where it is installed


class Import(NamedTuple):
    """Result of one fresh interpreter, with bytecode present."""

    wall_s: float
    processor_s: float


def import_s(modules: tuple[str, ...], times: int = TIMES) -> Import | None:
    """The fastest of several; None if a module is missing."""
    program = (
        f"import time; t, c = time.perf_counter(), time.process_time()\nimport {', '.join(modules)}\n"
        "print(time.perf_counter() - t, time.process_time() - c)"
    )
    found = []
    for _ in range(times):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
        if done.returncode != 0:
            return None
        wall, processor = done.stdout.split()
        found.append(Import(float(wall), float(processor)))
    return min(found)


def rss_mb() -> float:
    """Resident memory of the serving process after a health check, a tick and a sync."""
    with tempfile.TemporaryDirectory() as name, ids.issuer() as issuer, serving(Path(name), issuer.url) as (port, pid):
        now = int(time.time())
        clock = ids.bearer(ids.claims(iat=now - 5, exp=now + 3000, email=ids.CLOCK_MAIL, google=None))
        agent = ids.bearer(ids.claims(iat=now - 5, exp=now + 3000))
        ask(port, "/v1/tick", b"{}", clock)
        ask(port, "/v1/sync", b'{"boot":"b-1","facts":[{"kind":"hello"}]}', agent)
        return max(resident_mb(one) for one in family(pid))


@contextmanager
def serving(folder: Path, jwks: str) -> Iterator[tuple[int, int]]:
    """A ``functions-framework`` on loopback with an empty stack: (port, process id)."""
    bucket = f"sqlite://{folder}/bucket.db"
    stack = StackState("demo", "gcp", "p", "us-x1", "b", (), node_identity=ids.NODES)
    open_store(bucket).put(paths.STACK, msgspec.json.encode(stack))
    (folder / "main.py").write_text("from spotkeeper.reconcile.service.http import main\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {
        "SPOTKEEPER_STACK": "demo",
        "SPOTKEEPER_BUCKET": bucket,
        "SPOTKEEPER_AUDIENCE": ids.AUDIENCE,
        "SPOTKEEPER_INVOKERS": ids.CLOCK_MAIL,
        "SPOTKEEPER_JWKS": jwks,
        "SPOTKEEPER_COMPUTE_ENDPOINT": "http://127.0.0.1:9/compute/v1",  # no server: listings prove nothing
    }
    command = [sys.executable, "-m", "functions_framework", "--target", "main", "--source", str(folder / "main.py")]
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)],
        env=os.environ | settings,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(port, process)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(20)


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < give_up:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", "/v1/health")
            connection.getresponse().read()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError("functions-framework did not come up")


def ask(port: int, path: str, body: bytes, token: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", path, body, {"Content-Type": "application/json", "Authorization": token})
    answer = connection.getresponse()
    data = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"{path}: HTTP {answer.status} {json.loads(data)}")


def family(pid: int) -> list[int]:
    """The process and its children: the framework's server forks the serving one."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")) / 1024


def figures() -> list[dict[str, object]]:
    """For ``bench/run.py``."""
    imported, framework, sdk = import_s(MODULES), import_s(MODULES[:1]), import_s((SDK,), times=1)
    if imported is None or framework is None:
        raise RuntimeError("the function's modules cannot be imported: install the project's `function` extra")
    memory = rss_mb()
    known = (
        f"google-cloud-compute alone: {sdk.wall_s:.2f} s"
        if sdk
        else "google-cloud-compute alone: 1.03 s on an idle machine"
    )
    return [
        {
            "name": "function.cold_import_s",
            "value": round(imported.wall_s, 3),
            "unit": "s",
            "goal": f"<= {GOAL_IMPORT_S}",
            "holds": imported.wall_s <= GOAL_IMPORT_S,
            "against": f"least of {TIMES} ({imported.processor_s:.2f} s of processor), of which functions-framework "
            f"{framework.wall_s:.2f} s; {known}",
        },
        {
            "name": "function.rss_mb",
            "value": round(memory, 1),
            "unit": "MB",
            "goal": f"<= {GOAL_MB:.0f}",
            "holds": memory <= GOAL_MB,
            "against": "a functions-framework process after a tick and a sync; google-cloud-compute: 148 MB",
        },
    ]


if __name__ == "__main__":
    for figure in figures():
        print(f"{figure['name']}: {figure['value']} {figure['unit']} (goal {figure['goal']}); {figure['against']}")
