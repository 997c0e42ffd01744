"""Runs the declared function as a process: ``functions-framework`` in front of the declared source.

The source is the zip that the Pulumi program uploaded, or else this checkout's package. The process keeps running while
the control plane restarts, which then finds it by a marker in its environment. A process that ends is started again.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import shutil
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from spotkeeper.local.access.iam import ProjectIam
from spotkeeper.local.compute.resources import FUNCTION, Effect, Resource, Resources, section
from spotkeeper.local.core import catalog, procs
from spotkeeper.local.core.errors import ApiError
from spotkeeper.local.core.schema import JsonObject
from spotkeeper.local.core.views import FunctionView
from spotkeeper.local.core.world import World
from spotkeeper.local.machines.host import ROOT, Host, base_env

log = logging.getLogger("spotkeeper.local")
KIND = "functions"
READS_SOURCE = "roles/storage.objectViewer"  # a build's account needs it to read the source from Google's bucket
PORTS = range(9700, 9990)  # below the ephemeral ports, so that a restart finds its port free
AGAIN_S = 0.2  # real; wait before a restart, doubled each time that the function ends within STEADY_S
LONGEST_S = 10.0
STEADY_S = 5.0
_MAIN = "from spotkeeper.reconcile.service.http import main\n\n__all__ = ['main']\n"  # as in the zip that infra packs


class _StorageSource(Struct, frozen=True):
    bucket: str
    object: str


class _Source(Struct, frozen=True, rename="camel"):
    storage_source: _StorageSource | None = None


class _Build(Struct, frozen=True, rename="camel"):
    entry_point: str = "main"
    service_account: str = ""
    source: _Source = _Source()


class _Service(Struct, frozen=True, rename="camel"):
    environment_variables: dict[str, str] = {}
    service_account_email: str = catalog.DEFAULT_SERVICE_ACCOUNT


class FunctionDeclaration(Struct, frozen=True, rename="camel"):
    """The fields of a ``cloudfunctionsv2.Function`` that have an effect here."""

    location: str = ""
    project: str = ""
    build_config: _Build = _Build()
    service_config: _Service = _Service()


class FunctionDoc(Struct, frozen=True):
    """A function's document: its declaration, port and process."""

    name: str
    port: int
    address: str  # address of the function's metadata server
    email: str
    declaration: FunctionDeclaration
    pid: int = 0
    started: int = 0
    restarts: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


ReadObject = Callable[[str, str], bytes | None]


class Functions(Effect):
    """Implements ``cloudfunctionsv2:function``: runs a process for each declared function."""

    def __init__(
        self, world: World, resources: Resources, iam: ProjectIam, host: Host, read_object: ReadObject
    ) -> None:
        self._world = world
        self._iam = iam
        self._host = host
        self._read_object = read_object
        self.open_site: Callable[[str, str], None] = lambda _path, _address: None
        self.close_site: Callable[[str], None] = lambda _path: None
        self._backoff: dict[str, float] = {}
        self._since: dict[str, float] = {}
        resources.register(FUNCTION, self)

    def find(self, name: str) -> FunctionDoc | None:
        return self._world.state.get(KIND, name, FunctionDoc)

    def views(self) -> list[FunctionView]:
        return [FunctionView(doc.name, doc.url, doc.pid, doc.restarts, str(self._log(doc.name))) for doc in self.all()]

    def all(self) -> list[FunctionDoc]:
        return self._world.state.all(KIND, FunctionDoc)

    # The effect

    def check(self, name: str, properties: JsonObject) -> None:
        build = section(FunctionDeclaration, properties, name).build_config
        builder, source = build.service_account.rpartition("/")[2], build.source.storage_source
        if self._iam.knows(builder) and not self._iam.has_role(builder, READS_SOURCE):
            bucket = f"gcf-v2-sources-{catalog.PROJECT_NUMBER}"
            message = f"Access to bucket {bucket} denied. You must grant {READS_SOURCE} to {builder}."
            raise ApiError(403, "forbidden", message)
        if source is not None and self._read_object(source.bucket, source.object) is None:
            raise ApiError(400, "invalid", f"buildConfig.source: no object {source.object} in bucket {source.bucket}")

    def apply(self, resource: Resource) -> dict[str, str]:
        declaration = section(FunctionDeclaration, resource.properties, resource.name)
        old = self.find(resource.name)
        doc = FunctionDoc(
            resource.name,
            old.port if old else free_port(PORTS),
            old.address if old else self._address(),
            declaration.service_config.service_account_email,
            declaration,
        )
        self._build(doc)
        self._world.state.put(KIND, doc.name, doc)
        if old is not None:
            procs.kill_all(self._mark(doc.name))
        self._world.state.after(lambda: self.open_site(_site(doc.name), doc.address))
        self._world.state.after(lambda: self._start(doc.name))
        return {"url": doc.url, "uri": doc.url}

    def remove(self, resource: Resource) -> None:
        self._world.state.delete(KIND, resource.name)
        self._world.state.after(lambda: self._removed(resource.name))

    def _removed(self, name: str) -> None:
        procs.kill_all(self._mark(name))
        self.close_site(_site(name))
        shutil.rmtree(self._folder(name), ignore_errors=True)

    # The process

    def resume(self) -> None:
        """Adopt processes that kept running while the control plane restarted; start functions whose process ended."""
        for doc in self.all():
            self.open_site(_site(doc.name), doc.address)
            if procs.is_same(doc.pid, doc.started):
                self._watch(doc)
            else:
                procs.kill_all(self._mark(doc.name))
                self._start(doc.name)

    def _start(self, name: str) -> None:
        doc = self.find(name)
        if doc is None:
            return
        folder = self._folder(name)
        with self._log(name).open("ab") as output:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "functions_framework",
                    *("--target", doc.declaration.build_config.entry_point),
                    *("--source", str(folder / "main.py")),
                    *("--host", "127.0.0.1"),
                    *("--port", str(doc.port)),
                ],
                env=self._env(doc),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._since[name] = time.monotonic()
        doc = msgspec.structs.replace(doc, pid=process.pid, started=procs.start_time(process.pid) or 0)
        with self._world.state.transaction():
            self._world.state.put(KIND, name, doc)
        self._watch(doc)

    def restart(self, url: str) -> None:
        """Restart the process that serves this URL by killing it."""
        for doc in self.all():
            if url.startswith(f"{doc.url}/"):
                procs.kill_all(self._mark(doc.name))

    def _watch(self, doc: FunctionDoc) -> None:
        self._host.watch(doc.pid, doc.started, lambda: self._ended(doc.name, doc.pid))

    def _ended(self, name: str, pid: int) -> None:
        doc = self.find(name)
        if doc is None or doc.pid != pid:
            return
        procs.kill_all(self._mark(name))  # remaining workers of the process
        lived = time.monotonic() - self._since.get(name, 0.0)
        wait = AGAIN_S if lived > STEADY_S else min(LONGEST_S, 2 * self._backoff.get(name, AGAIN_S))
        self._backoff[name] = wait
        log.warning("function %s ended after %.1f s, starts again in %.1f s", name, lived, wait)
        with self._world.state.transaction():
            self._world.state.put(KIND, name, msgspec.structs.replace(doc, pid=0, restarts=doc.restarts + 1))
        asyncio.get_running_loop().call_later(wait, self._start_if_down, name)

    def _start_if_down(self, name: str) -> None:
        doc = self.find(name)
        if doc is not None and doc.pid == 0:
            self._start(name)

    def _env(self, doc: FunctionDoc) -> dict[str, str]:
        """The declared environment variables, with addresses of this cloud instead of Google's.

        ``K_SERVICE`` is not set, because it would mean that a platform has checked the caller.
        """
        config = self._world.config
        declared = doc.declaration.service_config.environment_variables
        project = doc.declaration.project or config.project  # the provider's project if the program names none
        promised = f"https://{doc.declaration.location}-{project}.cloudfunctions.net/{doc.name}"
        env = {name: doc.url if value == promised else value for name, value in declared.items()}
        if env.get("SPOTKEEPER_BUCKET", "").startswith("gs://"):
            env["SPOTKEEPER_BUCKET"] = f"sqlite://{self._world.folder / 'bucket.sqlite'}"
        for name, value in (
            ("COMPUTE_ENDPOINT", config.compute_endpoint),
            ("JWKS", f"{config.endpoint}/local/v1/jwks"),
        ):
            env.setdefault(f"SPOTKEEPER_{name}", value)
        return (
            base_env(self._world)
            | env
            | {
                procs.FUNCTION: self._mark_value(doc.name),
                "GCE_METADATA_HOST": f"{doc.address}:{config.port}",
                "PYTHONPATH": os.pathsep.join([str(self._folder(doc.name)), str(ROOT)]),
                "HOME": str(self._folder(doc.name)),
                "SPT_NOENV": "1",  # where setproctitle is installed, gunicorn's titles would overwrite these variables
                "MALLOC_ARENA_MAX": "2",  # each short-lived thread could have an arena, and arenas never shrink
                "FUNCTION_TARGET": doc.declaration.build_config.entry_point,
            }
        )

    def _build(self, doc: FunctionDoc) -> None:
        """Unpack the declared source into an empty folder."""
        folder = self._folder(doc.name)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        source = doc.declaration.build_config.source.storage_source
        data = self._read_object(source.bucket, source.object) if source else None
        if data is None:
            (folder / "main.py").write_text(_MAIN)
            return
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            archive.extractall(folder)

    def _folder(self, name: str) -> Path:
        return self._world.folder / "functions" / name

    def _log(self, name: str) -> Path:
        return self._world.folder / "serial" / f"function-{name}.log"

    def _mark_value(self, name: str) -> str:
        return f"{self._world.config.uid}-{name}"

    def _mark(self, name: str) -> bytes:
        return procs.mark(procs.FUNCTION, self._mark_value(name))

    def _address(self) -> str:
        block = 10 + int(self._world.config.uid[:4], 16) % 200
        return f"127.{block}.253.{self._world.state.next_number('function') % 250 + 1}"


def free_port(ports: range) -> int:
    """Return a port without a listener; OSError if every port has a listener."""
    start = os.getpid() % len(ports)
    for offset in range(len(ports)):
        port = ports[(start + offset) % len(ports)]
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port in {ports.start}..{ports.stop - 1}")


def _site(name: str) -> str:
    return f"functions/{name}"


def site_name(path: str) -> str | None:
    """Return a function's name from the path of its metadata server; None if the path is a VM's."""
    return path.removeprefix("functions/") if path.startswith("functions/") else None
