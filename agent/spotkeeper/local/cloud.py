"""A one-machine cloud from the outside: bring it up, find it again, hurt it, take it down, count what is left.

    cloud = LocalCloud.up(Path(".spotkeeper/local"), scale=60)
    cloud.preempt("sk-demo-...", notice=True)
    cloud.down()

Everything of a cloud lives in its folder and carries its mark; nothing else on the machine is ever touched.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TypeVar

import msgspec
import requests
from msgspec import Struct

from spotkeeper.clock import Clock
from spotkeeper.local import catalog, procs, sources, views
from spotkeeper.local.catalog import Timing
from spotkeeper.local.functions import free_port
from spotkeeper.local.host import AGENT, PASSED
from spotkeeper.local.keeper import PID_FILE, write_pid
from spotkeeper.local.market import Market
from spotkeeper.local.world import Config
from spotkeeper.spec import codec

T = TypeVar("T", bound=Struct)
PORTS = range(9100, 9690)  # below the ephemeral ports and the jobs' blocks
UP_S = 30.0  # real; the control plane answers in about one second
CALL_S = 15.0  # real
CONFIG = "cloud.json"
KEEPER = "keeper.pid"


class LocalCloudError(Exception):
    """The cloud could not be brought up or does not answer; the message says what to do."""


class DamagedError(LocalCloudError):
    """What the cloud is cannot be read any more, and processes of it may run; ``wreck`` ends them."""


class Upkeep(Enum):
    """What keeps a cloud going. Its VMs go on in every case, but nobody decides anything for them when STOPPED.

    ========= ======================================= ==========================================
    state     meaning                                 leaves to
    ========= ======================================= ==========================================
    WHOLE     a keeper starts the control plane again UNWATCHED when it is killed
    UNWATCHED a control plane, and no keeper          STOPPED at its end, WHOLE by ``up``
    STOPPED   neither; VMs may run                    WHOLE by ``up``, which finds the VMs again
    ========= ======================================= ==========================================
    """

    WHOLE = "whole"
    UNWATCHED = "unwatched"
    STOPPED = "stopped"


class LeftOver(Struct, frozen=True):
    """What still exists. Disks include snapshots."""

    vms: int
    disks: int
    processes: int

    def __bool__(self) -> bool:
        return bool(self.vms or self.disks or self.processes)


@dataclass(frozen=True)
class LocalCloud:
    """A running cloud. ``folder`` is absolute."""

    folder: Path
    config: Config
    fresh: bool = False  # whether this very ``up`` started it

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
        """Start a cloud in ``folder``, or find the one that is there: again changes nothing but its code.

        A folder that was brought down without a purge goes on where it was, with its old settings.

        Args:
            scale: virtual seconds in a real one.
            market: a recording of ``local/markets``, or the path of another one (``.json``).
            per_zone: spot VMs a zone carries when the recording shows a whole gang.
            calm_s: virtual seconds for which the market is to stay calm by itself.

        Raises:
            LocalCloudError: it does not answer, with the end of its log.
            ValueError: a setting makes no sense.
        """
        folder = folder.resolve()
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(_removed(folder), ignore_errors=True)
        folder.mkdir(mode=0o700, exist_ok=True)  # its bucket holds jobs' variables, its VMs' folders their output
        with _lock(folder):
            config = _read_config(folder)
            if config is None:
                if not 0 < scale < float("inf"):  # nor is it nan
                    raise ValueError(f"scale {scale}: want a number above 0")
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
                _write_config(folder, config)
            cloud = cls(folder, config, fresh=not _keeper_runs(folder))
            healing = cloud.fresh and bool(cloud._guests())
            try:
                if cloud.fresh:
                    cloud._start_keeper()
                elif sources.of(folder) != sources.digest():
                    cloud._renew()
                cloud._wait_healthy()
            except BaseException:  # Ctrl-C too: whoever called has no cloud yet that could be taken down
                if healing:  # the VMs were here before, and go on without it
                    cloud._end_upkeep()
                elif cloud.fresh:
                    cloud._end()
                raise
        return cloud

    @classmethod
    def attach(cls, folder: Path) -> LocalCloud:
        """The cloud of a folder, for later commands; it need not answer right now.

        Raises:
            LocalCloudError: there is none.
        """
        config = _read_config(folder.resolve())
        if config is None:
            raise LocalCloudError(f"{folder}: no cloud here; start one: spotkeeper local up (--folder says where)")
        return cls(folder.resolve(), config)

    @property
    def endpoint(self) -> str:
        """Root of everything: ``http://127.0.0.1:<port>``."""
        return self.config.endpoint

    @property
    def compute_endpoint(self) -> str:
        """For ``SPOTKEEPER_COMPUTE_ENDPOINT``."""
        return self.config.compute_endpoint

    @property
    def clock(self) -> Clock:
        real, virtual, scale = (float(part) for part in self.config.clock.split(":"))
        return Clock(real, virtual, scale)

    @property
    def bucket(self) -> str:
        """For ``SPOTKEEPER_BUCKET``: the file behind the one bucket."""
        return f"sqlite://{self.folder / 'bucket.sqlite'}"

    @property
    def upkeep(self) -> Upkeep:
        """By its processes, without asking it anything."""
        if _keeper_runs(self.folder):
            return Upkeep.WHOLE
        return Upkeep.STOPPED if _pid(self.folder / PID_FILE) is None else Upkeep.UNWATCHED

    # What only a stand-in can be asked

    def status(self) -> views.Status:
        """VMs, disks, zones, functions, money."""
        return self._get("status", views.Status)

    def bill(self) -> views.BillView:
        return self._get("bill", views.BillView)

    def preempt(self, vm: str, *, notice: bool = True) -> None:
        """Take a VM away. A standard VM gets a maintenance notice, or (no notice) its host breaks.

        Raises:
            LocalCloudError: no such VM, or no answer.
        """
        self._post(f"vms/{vm}/preempt", views.Preempt(notice))

    def maintenance(self, vm: str, event: str, in_s: float | None = None) -> None:
        """Show this ``maintenance-event``, and an ``upcoming-maintenance`` so many virtual seconds ahead."""
        self._post(f"vms/{vm}/maintenance", views.Maintenance(event, in_s))

    def set_capacity(self, zone: str, nodes: int | None, *, model: str = "spot", reclaim: bool = True) -> None:
        """How many VMs a zone carries; None gives it back to the market. ``reclaim``: take away what is too many."""
        self._post("capacity", views.SetCapacity(zone, nodes, model, reclaim))

    def partition(self, zone: str, partitioned: bool = True) -> None:
        """Whether the zone's API stops answering; its VMs go on."""
        self._post("partition", views.SetPartition(zone, partitioned))

    def set_quota(self, zone: str, instances: int) -> None:
        self._post("quota", views.SetQuota(zone, instances))

    def identity_token(self, email: str, audience: str) -> str:
        """An OIDC token of any service account of this cloud: what gcloud gives an operator who may impersonate it."""
        from spotkeeper.local.tokens import Tokens

        return Tokens(self.folder).identity(email, audience, self.clock.now())

    # The end

    def down(self, *, purge: bool = False) -> LeftOver:
        """Stop every process of this cloud and say what was still there. ``purge`` removes its folder too."""
        with _lock(self.folder):
            guests = len(self._guests())
            self._end()
            try:
                books = self._books()  # they stay as they are, and nobody writes in them any more
            except LocalCloudError:
                if not purge:
                    raise
                books = 0, 0  # nobody will read them any more either
        if purge:
            _remove(self.folder)
        return LeftOver(*books, guests)

    def _end(self) -> None:
        _end_keeper(self.folder)
        procs.kill_all(procs.mark(procs.CLOUD, self.config.uid))

    def _end_upkeep(self) -> None:
        """Keeper and control plane alone."""
        _end_keeper(self.folder)
        pid = _pid(self.folder / PID_FILE)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)

    def left_over(self) -> LeftOver:
        """VMs and disks by the cloud's own books, and processes of VMs and functions by their marks.

        The control plane itself and its keeper are not counted: they are the cloud.
        """
        return LeftOver(*self._books(), len(self._guests()))

    def _books(self) -> tuple[int, int]:
        """VMs, and disks with snapshots.

        Raises:
            LocalCloudError: they are damaged.
        """
        from spotkeeper.local.state import State

        path = self.folder / "state.sqlite"
        if not path.exists():
            return 0, 0
        try:
            with closing(State(path)) as state:
                return state.count("instances"), state.count("disks") + state.count("snapshots")
        except sqlite3.DatabaseError as error:
            raise LocalCloudError(f"{path}: {error}; {_end_of(self.folder)}") from None

    def _guests(self) -> set[int]:
        ours = procs.marked(procs.mark(procs.CLOUD, self.config.uid))
        own = {pid for pid in (_pid(self.folder / name) for name in (KEEPER, PID_FILE)) if pid}
        return ours - own

    # Plumbing

    def _start_keeper(self) -> None:
        env = {name: os.environ[name] for name in PASSED if name in os.environ}
        env |= {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "PYTHONPATH": str(AGENT)}
        env |= {procs.CLOUD: self.config.uid, "SPOTKEEPER_CLOCK": self.config.clock}
        with (self.folder / "server.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-S", "-m", "spotkeeper.local.keeper", str(self.folder)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        write_pid(self.folder / KEEPER, process.pid)

    def _renew(self) -> None:
        """A control plane of other code than is here now gives way to one of this; VMs go on meanwhile."""
        pid = _pid(self.folder / PID_FILE)
        if pid is None:
            return
        os.kill(pid, signal.SIGKILL)  # as its keeper expects of any end
        end = time.monotonic() + UP_S
        while _pid(self.folder / PID_FILE) in (None, pid) and time.monotonic() < end:
            time.sleep(0.02)

    def _wait_healthy(self) -> None:
        end = time.monotonic() + UP_S
        while time.monotonic() < end:
            try:
                with _session() as session:
                    if session.get(f"{self.endpoint}/local/v1/health", timeout=2).ok:
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
            with _session() as session:
                answer = session.request(method, url, data=body, timeout=CALL_S)
        except requests.RequestException as error:
            raise LocalCloudError(
                f"the cloud in {self.folder} does not answer ({type(error).__name__}); "
                f"start it: spotkeeper local up --folder {shlex.quote(str(self.folder))}"
            ) from None
        if not answer.ok:
            raise LocalCloudError(_message(answer))
        return answer.content


def _message(answer: requests.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code}"


def _session() -> requests.Session:
    session = requests.Session()
    session.trust_env = False  # a proxy has no way to this machine's loopback
    return session


def _removed(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.spotkeeper-removed")


def _remove(folder: Path) -> None:
    """First out of the way, which is all or nothing: who is killed in the middle leaves no half of a cloud, and
    what lies there then goes with the next ``up`` or ``down``."""
    removed = _removed(folder)
    shutil.rmtree(removed, ignore_errors=True)
    with suppress(OSError):  # such as a mount point, which stays where it is
        folder.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Two ``up`` at once make one cloud."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read_config(folder: Path) -> Config | None:
    """
    Raises:
        DamagedError: the file is, or it is gone while the cloud runs. To remove the folder would leave processes.
    """
    path = folder / CONFIG
    try:
        return codec.decode(path.read_bytes(), Config)
    except FileNotFoundError:
        if not _keeper_runs(folder):
            return None
        trouble = "is gone, but its cloud runs"
    except msgspec.DecodeError as error:
        trouble = str(error)
    raise DamagedError(f"{path}: {trouble}; {_end_of(folder)}, and start again")


def _end_of(folder: Path) -> str:
    return f"end it: spotkeeper local down --force --folder {shlex.quote(str(folder))}"


def _write_config(folder: Path, config: Config) -> None:
    """Whole or not at all: half of it would have to be removed by hand."""
    temporary = folder / f"{CONFIG}.new"
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(config)))
    temporary.replace(folder / CONFIG)


def _pid(path: Path) -> int | None:
    """A recorded process, if it is still that one."""
    try:
        pid, started = (int(word) for word in path.read_text().split())
    except (OSError, ValueError):
        return None
    return pid if procs.is_same(pid, started) else None


def _keeper_runs(folder: Path) -> bool:
    return _pid(folder / KEEPER) is not None


def _end_keeper(folder: Path) -> None:
    """First the keeper, so that it starts nothing again; the marks find the rest."""
    pid = _pid(folder / KEEPER)
    if pid is not None:
        os.kill(pid, signal.SIGKILL)


__all__ = ["DamagedError", "LeftOver", "LocalCloud", "LocalCloudError", "Upkeep"]
