"""Controls a one-machine cloud: starts and finds it, preempts its machines, stops it, counts what remains.

    cloud = LocalCloud.up(Path(".spotkeeper/local"), scale=60)
    cloud.preempt("sk-demo-...", notice=True)
    cloud.down()

All files of a cloud are in its folder; all its processes have its mark in their environment, and no others are killed.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TypeVar

import msgspec
import requests
from msgspec import Struct

from spotkeeper.clock import Clock
from spotkeeper.contract import codec
from spotkeeper.local.access.auth import OPERATOR_FILE, Tokens, operator_token
from spotkeeper.local.core import catalog, procs, views
from spotkeeper.local.core.catalog import Timing
from spotkeeper.local.core.market import Market
from spotkeeper.local.core.rest import refusal_message, session
from spotkeeper.local.core.world import Config
from spotkeeper.local.lifecycle.folder import (
    KEEPER,
    LocalCloudError,
    code_digest,
    count_resources,
    end_control_plane,
    end_keeper,
    lock,
    marks,
    read_config,
    removal_folder,
    remove,
    running_code,
    write_config,
)
from spotkeeper.local.lifecycle.keeper import PID_FILE, read_pid, write_pid
from spotkeeper.local.machines.host import PASSED, ROOT
from spotkeeper.local.serverless.functions import free_port

T = TypeVar("T", bound=Struct)
PORTS = range(9100, 9690)  # below the ephemeral ports and the jobs' blocks
UP_S = 30.0  # real; the control plane answers in about one second
CALL_S = 15.0  # real


class Upkeep(Enum):
    """The state of the cloud's own two processes. VMs run in every state, but in STOPPED nothing answers their calls.

    ========= ======================================= ==========================================
    state     meaning                                 next state
    ========= ======================================= ==========================================
    WHOLE     keeper and control plane run            UNWATCHED when the keeper is killed
    UNWATCHED only the control plane runs             STOPPED when it ends, WHOLE by ``up``
    STOPPED   neither of the two runs; VMs may run    WHOLE by ``up``, which finds the VMs again
    ========= ======================================= ==========================================
    """

    WHOLE = "whole"
    UNWATCHED = "unwatched"
    STOPPED = "stopped"


class LeftOver(Struct, frozen=True):
    """The numbers of remaining resources and processes. Disks include snapshots."""

    vms: int
    disks: int
    processes: int

    def __bool__(self) -> bool:
        return bool(self.vms or self.disks or self.processes)


@dataclass(frozen=True)
class LocalCloud:
    """A cloud in a folder, running or not. ``folder`` is absolute."""

    folder: Path
    config: Config
    fresh: bool = False  # whether this ``up`` started the cloud

    @classmethod
    def up(
        cls,
        folder: Path,
        *,
        scale: float = 60.0,
        market: str = "gcp-2025-10-h100",
        zones: tuple[str, ...] = catalog.ZONES,
        seed: int = 0,
        per_zone: int = 4,
        calm_s: float = 0.0,
        project: str = catalog.PROJECT,
        timing: Timing | None = None,
    ) -> LocalCloud:
        """Start a cloud in ``folder``, or find the running one and restart its control plane if the code has changed.

        A cloud that was stopped without a purge continues with its old state and settings.

        Args:
            scale: virtual seconds per real second.
            market: a recording of ``local/markets``, or the path of another recording (``.json``).
            per_zone: a zone's largest capacity, in spot VMs. The recording tells for how many of 16 VMs a zone had
                capacity at a time; the zone here has the same share of ``per_zone``.
            calm_s: virtual seconds at the start in which every zone keeps at least half of ``per_zone``.

        Raises:
            LocalCloudError: the cloud does not answer; the message has the end of its log.
            ValueError: a setting is invalid.
        """
        folder = folder.resolve()
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(removal_folder(folder), ignore_errors=True)
        read_config(folder)  # raises if this is not a folder
        folder.mkdir(mode=0o700, exist_ok=True)  # only for the user: it has the variables and output of jobs
        with lock(folder):
            config = read_config(folder)
            if config is None:
                if not 0 < scale < float("inf"):  # also refuses nan
                    raise ValueError(f"scale {scale}: must be a number above 0")
                Market.load(market, zones, epoch=0.0, seed=seed, per_zone=per_zone, calm_s=calm_s)
                now = time.time()
                config = Config(
                    uid=secrets.token_hex(6),
                    port=free_port(PORTS),
                    clock=Clock(now, now, scale).to_env(),
                    market=market,
                    zones=zones,
                    seed=seed,
                    per_zone=per_zone,
                    calm_s=calm_s,
                    project=project,
                    timing=timing or Timing(),
                )
                write_config(folder, config)
            operator_token(folder)
            cloud = cls(folder, config, fresh=read_pid(folder / KEEPER) is None)
            healing = cloud.fresh and bool(cloud._guests())
            try:
                if cloud.fresh:
                    cloud._start_keeper()
                elif running_code(folder) != code_digest():
                    cloud._replace_control_plane()
                cloud._wait_healthy()
            except BaseException:  # also Ctrl-C: the caller has no cloud object yet by which it could stop the cloud
                if healing:  # the VMs ran before, and continue
                    end_keeper(folder)
                    end_control_plane(folder)
                elif cloud.fresh:
                    cloud._end()
                raise
        return cloud

    @classmethod
    def attach(cls, folder: Path) -> LocalCloud:
        """Return the cloud in a folder, whether it runs or not; LocalCloudError if the folder has no cloud."""
        config = read_config(folder.resolve())
        if config is None:
            raise LocalCloudError(f"{folder}: no cloud here; start one (spotkeeper local up) or use another --folder")
        return cls(folder.resolve(), config)

    @property
    def endpoint(self) -> str:
        """Root of all URLs: ``http://127.0.0.1:<port>``."""
        return self.config.endpoint

    @property
    def compute_endpoint(self) -> str:
        """The value of ``SPOTKEEPER_COMPUTE_ENDPOINT``."""
        return self.config.compute_endpoint

    @property
    def token(self) -> str:
        """The operator's bearer token, required in every call; "" before the first ``up``."""
        path = self.folder / OPERATOR_FILE
        return path.read_text() if path.exists() else ""

    @property
    def headers(self) -> dict[str, str]:
        """Headers of an operator's request."""
        return {"Authorization": f"Bearer {self.token}"}

    @property
    def clock(self) -> Clock:
        return self.config.virtual_clock

    @property
    def bucket(self) -> str:
        """The value of ``SPOTKEEPER_BUCKET``: the URL of the SQLite file in which the bucket's objects are."""
        return f"sqlite://{self.folder / 'bucket.sqlite'}"

    @property
    def upkeep(self) -> Upkeep:
        """The state of the cloud's own processes, determined without calling the control plane."""
        if read_pid(self.folder / KEEPER) is not None:
            return Upkeep.WHOLE
        return Upkeep.STOPPED if read_pid(self.folder / PID_FILE) is None else Upkeep.UNWATCHED

    # The interface of ``/local/v1``

    def status(self) -> views.Status:
        """Return the VMs, disks, zones, functions and the bill."""
        return self._get("status", views.Status)

    def bill(self) -> views.BillView:
        return self._get("bill", views.BillView)

    def preempt(self, vm: str, *, notice: bool = True) -> None:
        """Preempt a spot VM, or make a standard VM's host fail. ``notice``: announce it first."""
        self._post(f"vms/{vm}/preempt", views.Preempt(notice))

    def maintenance(self, vm: str, event: str, in_s: float | None = None) -> None:
        """Set the VM's ``maintenance-event``. ``in_s``: virtual seconds until ``upcoming-maintenance`` begins."""
        self._post(f"vms/{vm}/maintenance", views.Maintenance(event, in_s))

    def set_capacity(self, zone: str, nodes: int | None, *, model: str = "spot", reclaim: bool = True) -> None:
        """Set a zone's capacity to ``nodes`` VMs; None ends the override. ``reclaim``: preempt VMs in excess."""
        self._post("capacity", views.SetCapacity(zone, nodes, model, reclaim))

    def partition(self, zone: str, partitioned: bool = True) -> None:
        """Make the zone's API unreachable, or restore it; the zone's VMs continue."""
        self._post("partition", views.SetPartition(zone, partitioned))

    def set_quota(self, zone: str, instances: int) -> None:
        self._post("quota", views.SetQuota(zone, instances))

    def identity_token(self, email: str, audience: str) -> str:
        """Return an OIDC token of any service account, as gcloud does for a user who may impersonate it."""
        return Tokens(self.folder).identity(email, audience, self.clock.now())

    # Stop

    def down(self, *, purge: bool = False) -> LeftOver:
        """Stop the cloud's processes; return how many VMs, disks and processes it had. ``purge`` removes the folder."""
        with lock(self.folder):
            guests = len(self._guests())
            self._end()
            try:
                resources = count_resources(self.folder)
            except LocalCloudError:
                if not purge:
                    raise
                resources = 0, 0
        if purge:
            remove(self.folder)
        return LeftOver(*resources, guests)

    def _end(self) -> None:
        end_keeper(self.folder)
        procs.kill_all(procs.mark(procs.CLOUD, self.config.uid))

    def left_over(self) -> LeftOver:
        """Count VMs and disks in the database, and processes of VMs and functions (not keeper and control plane)."""
        return LeftOver(*count_resources(self.folder), len(self._guests()))

    def _guests(self) -> set[int]:
        marked = procs.marked(procs.mark(procs.CLOUD, self.config.uid))
        return marked - {read_pid(self.folder / name) or 0 for name in (KEEPER, PID_FILE)}

    # Processes and calls

    def _start_keeper(self) -> None:
        env = {name: os.environ[name] for name in PASSED if name in os.environ}
        env |= {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "PYTHONPATH": str(ROOT)}
        env |= {procs.CLOUD: self.config.uid, "SPOTKEEPER_CLOCK": self.config.clock}
        with (self.folder / "server.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-S", "-m", "spotkeeper.local.lifecycle.keeper", str(self.folder)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        write_pid(self.folder / KEEPER, process.pid)

    def _replace_control_plane(self) -> None:
        """Kill a control plane that runs older code, so that its keeper starts a new one; VMs continue meanwhile."""
        pid = end_control_plane(self.folder)
        end = time.monotonic() + UP_S
        while pid is not None and read_pid(self.folder / PID_FILE) in (None, pid) and time.monotonic() < end:
            time.sleep(0.02)

    def _wait_healthy(self) -> None:
        end = time.monotonic() + UP_S
        while time.monotonic() < end:
            try:
                with session() as http:
                    if http.get(f"{self.endpoint}/local/v1/health", timeout=2).ok:
                        return
            except requests.RequestException:
                time.sleep(0.05)
        log = (self.folder / "server.log").read_text(errors="replace")[-2000:]
        raise LocalCloudError(f"{self.folder}: the control plane does not answer after {UP_S:.0f} s\n{log}")

    def _get(self, path: str, kind: type[T]) -> T:
        return codec.decode(self._call("GET", path), kind)

    def _post(self, path: str, body: Struct) -> None:
        self._call("POST", path, msgspec.json.encode(body))

    def _call(self, method: str, path: str, body: bytes | None = None) -> bytes:
        url = f"{self.endpoint}/local/v1/{path}"
        try:
            with session() as http:
                headers = {**self.headers, "Content-Type": "application/json"}
                answer = http.request(method, url, data=body, headers=headers, timeout=CALL_S)
        except requests.RequestException as error:
            raise LocalCloudError(
                f"the cloud in {self.folder} does not answer ({type(error).__name__}); "
                f"start it: spotkeeper local up --folder {shlex.quote(str(self.folder))}"
            ) from None
        if not answer.ok:
            raise LocalCloudError(refusal_message(answer))
        return answer.content


def force_cleanup(folder: Path) -> LeftOver:
    """Stop a cloud and remove its folder, even if ``cloud.json`` is damaged. Returns what ``down`` returns."""
    folder = folder.resolve()
    *others, last = sorted(marks(folder)) or [secrets.token_hex(6)]  # without marks: a mark that no process has
    for uid in others:  # a second cloud, started in the folder while the first could not be found
        procs.kill_all(procs.mark(procs.CLOUD, uid))
    return LocalCloud(folder, Config(last, 0, "")).down(purge=True)
