"""A metadata server, a function and a bucket for one machine, scripted by a test. Standard library only."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from spotkeeper.contract.facts import Kind
from spotkeeper.contract.generation import DocState, FactIn, Generation, JobRun, Member, Progress, Role, Sync, SyncReply

REPO = Path(__file__).resolve().parents[2]
JOB = "abcdefgh"
JOB_UID = "6f1c8a52-0000-4000-8000-000000000001"


class Fake:
    """One HTTP server for all three roles; every answer is what the test has set. Thread-safe by one condition."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.instances: dict[str, dict[str, Any]] = {}  # by path prefix: one metadata server per machine
        self.etag = 0
        self.metadata_status = 200
        self.function_status = 200
        self.replies: dict[str, SyncReply] = {}  # by uid
        self.syncs: list[tuple[str, Sync]] = []
        self.facts: list[tuple[str, FactIn]] = []
        self.progress: list[Progress] = []
        self.objects: dict[str, bytes] = {}
        self.sent: list[str] = []  # names of all uploads, also of those that were refused
        self.storage_status: Callable[[str], int] = lambda name: 200  # of the upload of this name
        fake = self

        class Handler(BaseHTTPRequestHandler):
            uid = ""
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                fake.get(self)

            def do_DELETE(self) -> None:
                with fake.changed:
                    gone = fake.objects.pop(unquote(urlsplit(self.path).path.rpartition("/")[2]), None)
                _answer(self, 404 if gone is None else 204, b"")

            def do_POST(self) -> None:
                fake.post(self, self.rfile.read(int(self.headers.get("Content-Length", "0"))))

            def log_message(self, *_: object) -> None:
                pass

        self._handler = Handler
        self._servers: list[ThreadingHTTPServer] = []
        self.url = f"http://{self.listen('')}"

    def listen(self, uid: str) -> str:
        """Another address; a machine is known by the one it asks, as on its own link."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (self._handler,), {"uid": uid}))
        server.daemon_threads = True
        self._servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return f"127.0.0.1:{server.server_port}"

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    # ---------------------------------------------------------------- what tests set and await

    def instance(self, uid: str, name: str, **changes: Any) -> None:
        """Make or change what the metadata server of a machine says."""
        with self.changed:
            old = self.instances.get(uid) or {
                "id": int(uid),
                "name": name,
                "zone": "projects/1/zones/us-x1-a",
                "attributes": {
                    "sk-stack": "test",
                    "sk-function": f"{self.url}/fn",
                    "sk-bucket": "bucket",
                    "sk-storage": self.url,
                },
                "networkInterfaces": [{"ip": "127.0.0.1"}],
                "preempted": "FALSE",
                "maintenanceEvent": "NONE",
                "somethingNew": {"a": 1},
            }
            self.instances[uid] = old | changes
            self.etag += 1
            self.changed.notify_all()

    def reply(self, uid: str, reply: SyncReply) -> None:
        with self.changed:
            self.replies[uid] = reply

    def kinds(self, uid: str) -> list[tuple[str, int, str]]:
        with self.changed:
            return [(fact.kind.value, fact.gen, fact.value) for by, fact in self.facts if by == uid]

    def wait(self, what: Callable[[], Any], timeout_s: float = 60.0) -> Any:
        """What ``what`` gives, once it gives something."""
        until = time.monotonic() + timeout_s
        with self.changed:
            while not (found := what()):
                if not self.changed.wait(min(0.2, until - time.monotonic())) and time.monotonic() > until:
                    facts = [(uid, fact.kind.value, fact.gen, fact.value) for uid, fact in self.facts]
                    raise AssertionError(f"not within {timeout_s} s; facts so far: {facts}")
            return found

    def wait_fact(self, uid: str, kind: Kind, gen: int | None = None, timeout_s: float = 60.0) -> FactIn:
        def find() -> FactIn | None:
            return next(
                (f for by, f in self.facts if by == uid and f.kind is kind and (gen is None or f.gen == gen)), None
            )

        found: FactIn = self.wait(find, timeout_s)
        return found

    def wait_sync(self, uid: str) -> None:
        """Until the agent of a machine has asked what it is: its boot is known by then."""
        self.wait(lambda: any(by == uid for by, _ in self.syncs))

    # ---------------------------------------------------------------- the servers

    def get(self, handler: BaseHTTPRequestHandler) -> None:
        path, query = urlsplit(handler.path).path, parse_qs(urlsplit(handler.path).query)
        if path.startswith("/storage/v1/b/bucket/o/"):
            content = self.objects.get(unquote(path.rpartition("/")[2]))
            body = content if content is None or query.get("alt") == ["media"] else _about(content)
            _answer(handler, 404 if body is None else 200, body or b"")
            return
        uid = handler.uid  # type: ignore[attr-defined]
        if handler.headers.get("Metadata-Flavor") != "Google":
            _answer(handler, 403, b"")
        elif self.metadata_status != 200:
            _answer(handler, self.metadata_status, b"")
        elif path.endswith("/identity"):
            _answer(handler, 200, f"{uid}.{_claims(query['audience'][0])}.sig".encode())
        elif path.endswith("/token"):
            _answer(handler, 200, b'{"access_token": "ya29.secret", "expires_in": 3599, "token_type": "Bearer"}')
        else:
            self._tree(handler, uid, query)

    def _tree(self, handler: BaseHTTPRequestHandler, uid: str, query: dict[str, list[str]]) -> None:
        with self.changed:
            if "wait_for_change" in query:
                last = query.get("last_etag", ["?"])[0]
                until = time.monotonic() + float(query["timeout_sec"][0])
                while str(self.etag) == last and time.monotonic() < until and self.metadata_status == 200:
                    self.changed.wait(0.2)
            body, etag, status = json.dumps(self.instances[uid]).encode(), str(self.etag), self.metadata_status
        _answer(handler, status, body, {"ETag": etag})

    def post(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        split = urlsplit(handler.path)
        if split.path == "/upload/storage/v1/b/bucket/o":
            query = parse_qs(split.query)
            name = query["name"][0]
            with self.changed:
                self.sent.append(name)
                status = self.storage_status(name)
                if status == 200 and "ifGenerationMatch" in query and name in self.objects:
                    status = 412
                if status == 200:
                    self.objects[name] = body
                self.changed.notify_all()
            _answer(handler, status, _about(body))
            return
        uid = self.who(handler, body)
        if self.function_status != 200 or not uid:
            _answer(handler, self.function_status if uid else 403, b"")
            return
        sync = msgspec.json.decode(body, type=Sync)
        with self.changed:
            self.syncs.append((uid, sync))
            self.facts += [(uid, fact) for fact in sync.facts]
            if sync.progress is not None:
                self.progress.append(sync.progress)
            reply = self.replies.get(uid, SyncReply(Role.UNKNOWN))
            if reply.doc is not None and reply.doc.ver <= sync.ver:
                reply = msgspec.structs.replace(reply, doc=None, run=None)
            self.changed.notify_all()
        _answer(handler, 200, msgspec.json.encode(reply))

    def who(self, handler: BaseHTTPRequestHandler, body: bytes) -> str:
        """The machine that speaks, as the platform in front of the function knows it; "": it lets nobody through."""
        return handler.headers.get("Authorization", "").removeprefix("Bearer ").partition(".")[0]


def _answer(handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    with contextlib.suppress(OSError):  # the agent was killed meanwhile
        handler.send_response(status)
        for name, value in (headers or {}).items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)


def _about(content: bytes) -> bytes:
    """What the storage API says of an object."""
    md5 = base64.b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode()
    return json.dumps({"kind": "storage#object", "size": str(len(content)), "md5Hash": md5}).encode()


def _claims(audience: str) -> str:
    claims = json.dumps({"aud": audience, "exp": time.time() + 3600}).encode()
    return base64.urlsafe_b64encode(claims).decode().rstrip("=")


@dataclass
class Machine:
    """A VM of a test: its own root folder, an init to power off, and the real agent as a process."""

    fake: Fake
    root: Path
    uid: str = "1001"
    name: str = f"sk-test-{JOB}-n0000-a1"
    node: int = 0
    address: str = "127.0.1.1"
    clock: str = ""
    environ: dict[str, str] = field(default_factory=dict)
    agent: subprocess.Popen[bytes] | None = None
    init: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        self.fake.instance(self.uid, self.name, networkInterfaces=[{"ip": self.address}])
        self.init = subprocess.Popen(["sleep", "600"])
        self.metadata = self.fake.listen(self.uid)

    @property
    def run_folder(self) -> Path:
        return self.root / "run/spotkeeper"

    @property
    def boot(self) -> str:
        return (self.run_folder / "boot").read_text().split()[0]

    def start(self) -> None:
        assert self.init is not None
        env = os.environ | {
            # As a bundle's site/ is on a VM: packages on the path, and no .pth file of an environment.
            "PYTHONPATH": f"{REPO / 'agent'}:{REPO}:{sysconfig.get_path('purelib')}",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            **self.metadata_environ(),
            "SPOTKEEPER_ROOT": str(self.root),
            "SPOTKEEPER_INIT_PID": str(self.init.pid),
            "OMP_NUM_THREADS": "1",
        }
        if self.clock:
            env["SPOTKEEPER_CLOCK"] = self.clock
        with (self.root / "agent.log").open("ab") as log:
            self.agent = subprocess.Popen(
                [sys.executable, "-S", "-m", "spotkeeper_agent"], env=env | self.environ, stdout=log, stderr=log
            )

    def metadata_environ(self) -> dict[str, str]:
        return {"GCE_METADATA_HOST": self.metadata}

    def kill(self) -> None:
        assert self.agent is not None
        self.agent.kill()
        self.agent.wait()

    def end(self) -> None:
        """Take everything of this machine away, as the end of a VM does."""
        for process in (self.agent, self.init):
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                process.wait()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def light_python(self) -> str:
        """Give the machine an interpreter that starts the light launcher instead of one that imports torch."""
        path = self.root / "light-python"
        if path.exists():
            return str(path)  # written anew, it could not be executed meanwhile (ETXTBSY), or would be empty
        path.write_text(f'#!/bin/sh\nexec {sys.executable} -S {REPO}/tests/agent/light_launcher.py "$4"\n')
        path.chmod(0o755)
        return str(path)

    def attach_disk(self) -> Path:
        disk = self.root / "disk"
        disk.mkdir(exist_ok=True)
        device = self.root / "dev/disk/by-id/google-sk-data"
        device.parent.mkdir(parents=True, exist_ok=True)
        device.symlink_to(disk)
        return disk

    def processes(self) -> list[int]:
        """Every process that was started with this machine's root in its environment."""
        mark = f"SPOTKEEPER_ROOT={self.root}".encode()
        return [pid for pid in all_pids() if mark in environ_of(pid)]

    def log(self) -> str:
        return (self.root / "agent.log").read_text()

    def member(self, disk: bool = False, nproc: int = 1) -> Member:
        return Member(self.node, 1, self.uid, self.boot, self.address, nproc, disk)

    def stand_by(self, run: JobRun, **fields: Any) -> None:
        self.fake.reply(self.uid, SyncReply(Role.STANDBY, JOB, self.node, 1, run=run, **fields))

    def serve(self, doc: Generation, run: JobRun, **fields: Any) -> None:
        self.fake.reply(self.uid, SyncReply(Role.MEMBER, JOB, self.node, 1, doc=doc, run=run, **fields))


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208


def environ_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def children_of(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(what: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """Poll what has no event: another process's files and children."""
    until = time.monotonic() + timeout_s
    while not (found := what()):
        assert time.monotonic() < until, f"not within {timeout_s} s"
        time.sleep(0.01)
    return found


def document(
    ver: int, gen: int, members: tuple[Member, ...], state: DocState = DocState.RUN, *, port: int = 0, **fields: Any
) -> Generation:
    return Generation(
        job=JOB,
        uid=JOB_UID,
        ver=ver,
        gen=gen,
        state=state,
        members=members,
        master=members[0].address if members else "",
        port=port or free_port(),
        run_id=f"{JOB_UID}-{gen}",
        **fields,
    )


def free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def source(fake: Fake, files: dict[str, str]) -> str:
    """Put a source tar into the bucket; its hash."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    sha256 = hashlib.sha256(buffer.getvalue()).hexdigest()
    fake.objects[f"jobs/{JOB}/source/{sha256}"] = buffer.getvalue()
    return sha256


@contextlib.contextmanager
def fake_cloud() -> Iterator[Fake]:
    fake = Fake()
    try:
        yield fake
    finally:
        fake.close()
