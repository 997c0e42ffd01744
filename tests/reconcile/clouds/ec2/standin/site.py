"""One EC2 region under virtual time: what is in it, what it does by itself, and what is done to it.

Stricter than moto, where peers had real bugs: tokens outlive their machines, everything is asynchronous, what was
made is not visible at once, capacity and quotas are by zone and model, calls are throttled by EC2's own buckets, a
volume is held until its machine is gone. ``verbs.py`` answers calls from it; ``server.py`` serves it on loopback.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from tests.reconcile.clouds.ec2.standin.protocol import Ec2Error
from tests.reconcile.clouds.ec2.standin.things import Instance, Reserved, Run, Snapshot, Template, Vol, Volume

LISTED_S = 3600.0  # a terminated machine
TOKEN_S = 86_400.0  # a token, after its machine's end
READS, CHANGES = (100.0, 20.0), (50.0, 5.0)  # EC2's buckets: how many at once, how many a second
BUCKETS = {"RunInstances": (5.0, 2.0), "CreateVolume": (100.0, 5.0), "CreateSnapshot": (100.0, 5.0)}


class Time(Protocol):
    """``tests.sim.engine.Engine``."""

    def now(self) -> float: ...
    def after(self, seconds: float, what: Callable[[], None]) -> object: ...


@dataclass
class Delays:
    """Seconds, least and most, drawn evenly."""

    seen: tuple[float, float] = (1.0, 6.0)  # until what was made is visible
    start: tuple[float, float] = (8.0, 25.0)
    gone: tuple[float, float] = (5.0, 40.0)
    disk: tuple[float, float] = (1.0, 4.0)
    attach: tuple[float, float] = (1.0, 4.0)
    shot: tuple[float, float] = (10.0, 60.0)


@dataclass
class Fault:
    """What the next calls of an operation meet. ``done``: it is carried out first; no ``code``: no answer comes."""

    operation: str
    code: str = ""
    status: int = 400
    times: int = 1
    done: bool = False
    zone: str = ""
    said: str = "told to"


class LostError(Exception):
    """No answer comes of this call."""


class Watcher:
    """Is told what becomes of things; a simulation overrides it."""

    def launched(self, instance: Instance) -> None: ...
    def running(self, instance: Instance) -> None: ...
    def stopping(self, instance: Instance, seconds: float) -> None: ...
    def ending(self, instance: Instance) -> None: ...
    def gone(self, instance: Instance) -> None: ...
    def made(self, thing: Volume | Snapshot) -> None: ...
    def attached(self, volume: Volume) -> None: ...
    def dropped(self, thing: Volume | Snapshot) -> None: ...
    def changed(self) -> None: ...


@dataclass
class Market:
    """What may be had: machines by (zone, spot), and how many of the account's. None: as many as are wanted."""

    capacity: Callable[[str, bool], int | None] = lambda zone, spot: None
    spot_quota: int | None = None
    on_demand_quota: int | None = None
    prices: list[tuple[str, float, str]] = field(default_factory=list)  # zone, from when, USD
    scores: dict[str, int] = field(default_factory=dict)  # by zone id


class Site:
    """One region of one account."""

    def __init__(
        self, time: Time, zones: dict[str, str], seed: int = 0, delays: Delays | None = None, region: str = ""
    ) -> None:
        """``zones``: name -> id."""
        self.region, self.abroad = region, dict[str, Site]()  # the account's other regions
        self.time, self.zones, self.random = time, zones, Random(seed)  # noqa: S311
        self.delays, self.market = delays or Delays(), Market()
        self.watcher: Watcher = Watcher()
        self.templates: dict[str, Template] = {}
        self.subnets: dict[str, str] = {}  # id -> zone
        self.groups: set[str] = set()
        self.reserved: dict[str, Reserved] = {}  # capacity reservations and capacity blocks, by id
        self.spot_role = True  # AWSServiceRoleForEC2Spot: a fresh account has none, and the function may not make it
        self.instances: dict[str, Instance] = {}
        self.volumes: dict[str, Volume] = {}
        self.dropped: dict[str, Volume] = {}  # what a token still tells of
        self.snapshots: dict[str, Snapshot] = {}
        self.written = 0  # how many blocks a new volume has
        self.rewritten = 0  # how many of an attached volume's blocks change after each snapshot
        self.copied: list[tuple[str, str, float]] = []  # billed transfers into this region: from, to, GB
        self.tokens: dict[tuple[str, str], tuple[object, str]] = {}  # (operation, token) -> (request, id)
        self.faults: list[Fault] = []
        self.dark: set[str] = set()  # zones in an outage
        self.strict_tokens = False  # the token of a terminated machine is an error, not that machine
        self.throttling = True
        self.calls: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self._buckets: dict[str, tuple[float, float]] = {}
        self._made = int.from_bytes(region.encode()) % 9973 << 20  # no two regions use the same ids

    # -- what calls meet before anything else

    def admit(self, operation: str, zone: str = "") -> Fault | None:
        """Throttles, fails, or lets through.

        Raises:
            Ec2Error: the call is not carried out.
        """
        self.calls[operation] += 1
        if self.throttling and not self._token_for(operation):
            raise Ec2Error("RequestLimitExceeded", "Request limit exceeded.", 503)
        for fault in self.faults:
            if fault.operation == operation and fault.zone in ("", zone) and fault.times > 0:
                fault.times -= 1
                if fault.done:
                    return fault
                if fault.code:
                    raise Ec2Error(fault.code, fault.said, fault.status)
                raise LostError(operation)
        return None

    def _token_for(self, operation: str) -> bool:
        size, per_s = BUCKETS.get(operation) or (READS if operation.startswith(("Describe", "Get")) else CHANGES)
        now = self.time.now()
        left, since = self._buckets.get(operation, (size, now))
        left = min(size, left + (now - since) * per_s)
        self._buckets[operation] = (max(0.0, left - 1.0), now)
        return left >= 1.0

    def id(self, prefix: str) -> str:
        self._made += 1
        return f"{prefix}-{0x0A00_0000_0000_0000_0 + self._made:017x}"

    @property
    def made(self) -> int:
        return self._made

    def seen_at(self) -> float:
        return self.time.now() + self._draw(self.delays.seen)

    def _draw(self, span: tuple[float, float]) -> float:
        return self.random.uniform(*span)

    # -- machines

    def used(self, zone: str, spot: bool) -> int:
        """Machines that hold capacity: one that has its notice has lost its claim."""
        return sum(
            one.there and one.notice is None and one.zone == zone and one.spot is spot
            for one in self.instances.values()
        )

    def launch(self, instance: Instance) -> None:
        self.instances[instance.id] = instance
        self.watcher.launched(instance)
        self.changed()
        self.time.after(instance.visible_at - self.time.now(), self.changed)
        self.time.after(self._draw(self.delays.start), lambda: self._running(instance))

    def _running(self, instance: Instance) -> None:
        if instance.state is Run.PENDING:
            instance.state = Run.RUNNING
            self.watcher.running(instance)
            self.changed()

    def fail(self, instance: Instance, code: str, message: str) -> None:
        """A launch that was accepted comes to nothing."""
        instance.reason = (code, message)
        self.end(instance)

    def stop(self, instance: Instance, reason: tuple[str, str], seconds: float | None = None) -> None:
        """It goes down, and holds its volumes until it is gone."""
        if not instance.there:
            return
        instance.reason = reason
        if instance.state is Run.PENDING:
            seconds = 1.0
        instance.state, instance.stopped = Run.SHUTTING_DOWN, self.time.now()
        took = self._draw(self.delays.gone) if seconds is None else seconds
        self.watcher.stopping(instance, took)
        self.changed()
        self.time.after(took, lambda: self.end(instance))

    def end(self, instance: Instance) -> None:
        if instance.state is Run.TERMINATED:
            return
        self.watcher.ending(instance)
        instance.state, instance.ended = Run.TERMINATED, self.time.now()
        for volume in self.volumes.values():
            if volume.holder == instance.id:
                self._free(volume)
        self.watcher.gone(instance)
        self.changed()
        self.time.after(LISTED_S, lambda: self._forget(instance))

    def _forget(self, instance: Instance) -> None:
        self.instances.pop(instance.id, None)
        self.changed()

    def interrupt(self, instance: Instance, notice_s: float) -> None:
        """The market takes it back: a warning first, then as ``TerminateInstances``. ``notice_s`` 0: no warning."""
        instance.notice = self.time.now() + notice_s
        reason = ("Server.SpotInstanceTermination", "Spot instance termination")
        self.time.after(notice_s, lambda: self.stop(instance, reason) if instance.notice is not None else None)

    # -- volumes and snapshots

    def add_volume(self, volume: Volume) -> None:
        self.volumes[volume.id] = volume
        self.watcher.made(volume)
        self.changed()

        def ready() -> None:
            if volume.state is Vol.CREATING:
                volume.state = Vol.AVAILABLE
                self.changed()

        self.time.after(max(self._draw(self.delays.disk), volume.visible_at - self.time.now()), ready)

    def attach(self, volume: Volume, instance: Instance, device: str) -> None:
        volume.state, volume.holder, volume.device, volume.link = Vol.IN_USE, instance.id, device, "attaching"
        self.changed()

        def there() -> None:
            if volume.holder == instance.id and volume.link == "attaching":
                volume.link = "attached"
                self.watcher.attached(volume)
                self.changed()

        self.time.after(self._draw(self.delays.attach), there)

    def detach(self, volume: Volume) -> None:
        volume.link, holder = "detaching", volume.holder
        self.changed()
        self.time.after(self._draw(self.delays.attach), lambda: self._free(volume) if volume.holder == holder else None)

    def _free(self, volume: Volume) -> None:
        volume.state, volume.holder, volume.link = Vol.AVAILABLE, "", ""
        self.changed()

    def drop_volume(self, volume: Volume) -> None:
        self.dropped[volume.id] = self.volumes.pop(volume.id)
        self.watcher.dropped(volume)
        self.changed()

    def add_snapshot(self, snapshot: Snapshot) -> None:
        self.snapshots[snapshot.id] = snapshot
        self.watcher.made(snapshot)
        self.changed()

        def ready() -> None:
            if snapshot.id in self.snapshots and snapshot.state == "pending":
                snapshot.state = "completed"
                self.changed()

        self.time.after(max(self._draw(self.delays.shot), snapshot.visible_at - self.time.now()), ready)

    def drop_snapshot(self, snapshot: Snapshot) -> None:
        del self.snapshots[snapshot.id]
        self.watcher.dropped(snapshot)
        self.changed()

    def changed(self) -> None:
        self.watcher.changed()
