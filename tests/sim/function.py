"""The function under virtual time: the shipped HTTP app over the simulated bucket and cloud, and what befalls it.

Each process holds a ``HttpApp`` of its own; a request goes to one of them. A process can be killed before or after
any call (nothing of it runs on: no ``finally``, no retry), or freeze there while the world moves on.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

import msgspec

from spotkeeper.contract.generation import Sync, SyncReply
from spotkeeper.contract.notification import ChannelState, Notification
from spotkeeper.reconcile.controller.bursts import GATHER_S
from spotkeeper.reconcile.controller.document import Speaker
from spotkeeper.reconcile.controller.reconcile_job import RoundOptions
from spotkeeper.reconcile.service.auth import Caller
from spotkeeper.reconcile.service.http import HttpApp
from spotkeeper.reconcile.service.runtime import FunctionSettings, Runtime
from spotkeeper.reconcile.store.objects import StoreError
from tests.sim.store import EFFECTS, Tapped

if TYPE_CHECKING:
    from tests.sim.world import World

PROCESSES = 2
DEEPEST = 3  # requests inside requests (a round that waits lets others in); beyond it, nobody waits


class Killed(BaseException):
    """The process is gone. Not an ``Exception``: only the caller that requested it may catch it."""


@dataclass(frozen=True)
class Point:
    """Where a process can die: before the first call of a request, or after any."""

    request: int
    verb: str  # "" before the first call
    effect: bool
    agent: bool = False  # whose request it is


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    data: bytes
    headers: dict[str, str]

    @property
    def content_length(self) -> int:
        return len(self.data)

    @property
    def stream(self) -> io.BytesIO:
        return io.BytesIO(self.data)


class _Believes:
    """Stands for the verifier: identity is a subject of its own tests. A token says who speaks, in plain words."""

    def agent(self, authorization: str | None, *_: object) -> Speaker:
        uid, name, zone = (authorization or "").split()[1:]
        return Speaker(uid, name, zone)

    def invoker(self, *_: object) -> Caller:
        return Caller("schedule")

    hint = invoker


class Process:
    """One instance of the function: what is in its memory dies with it."""

    def __init__(self, function: Function) -> None:
        self.dead = False
        self.frozen = 0  # it stands still: its thread that renews a lease too
        self.function, world = function, function.world

        def tap(verb: str, before: bool) -> None:
            function.passes(self, verb, before)

        store, cloud = Tapped(world.store, tap, function.counts), Tapped(world.cloud.process(), tap, function.counts)
        settings = FunctionSettings(stack=world.stack.stack, bucket="", clock=world.engine)  # type: ignore[arg-type]
        runtime = Runtime(settings, store, cloud)  # type: ignore[arg-type]
        runtime._verifier = _Believes()  # type: ignore[assignment]
        runtime._send = self.send
        runtime.monotonic = lambda: 0.0  # a request takes no real time: how fast this machine is changes no story
        every = self.every if world.beats else None
        runtime._options = RoundOptions(sleep=function.sleep, parallel=1, settle_s=world.settle_s, every=every)
        self._tap = tap
        self.app = HttpApp(runtime)

    def send(self, channel: ChannelState, notification: Notification) -> None:
        """A channel receives it; then the process may die before it can note that."""
        self._tap("send", True)
        self.function.world.received.append((channel.name, notification))
        self.function.world.received_at.append(self.function.world.engine.now())
        self._tap("send", False)

    def every(self, seconds: float, work: Callable[[], object]) -> Callable[[], None]:
        """As ``lease.in_thread``: a thread of this process, which dies and freezes with it."""
        engine, ended = self.function.world.engine, False

        def beat() -> None:
            if ended or self.dead:
                return
            try:
                if not self.frozen:
                    self.function.counts["beat"] += 1
                    work()
            except StoreError:
                pass  # it is renewed the next time, or runs out
            except Killed:
                self.function.end(self)
                return
            engine.after(seconds, beat)

        def stop() -> None:
            nonlocal ended
            ended = True

        engine.after(seconds, beat)
        return stop


class Function:
    """All requests. ``counts``: verbs called, and requests by path."""

    def __init__(self, world: World, random: Random) -> None:
        self.world, self.random = world, random
        self.counts: Counter[str] = Counter()
        self.requests = 0
        self.kills = 0
        self.down = False  # answers nobody
        self.up_since = 0.0
        self.lost = 0.0  # share of requests whose answer never comes (half of them never arrive)
        self.kill_rate = self.stall_rate = 0.0  # at every effect
        self.store_rate = 0.0  # effects of the bucket that end in a StoreError, carried out or not
        self.points: list[Point] | None = None  # of a run that is being mapped
        self.kill_at = self.stall_at = -1  # index of a point
        self.stall_s = 90.0
        self.miss = -1  # this request never arrives
        self._at = -1
        self._deep = 0
        self._agent = False
        self._processes: list[Process] = []

    def _process(self) -> Process:
        if len(self._processes) < PROCESSES:
            self._processes.append(Process(self))
            return self._processes[-1]
        return self._processes[self.requests % PROCESSES]

    def ask(self, path: str, body: bytes = b"", who: Speaker | None = None) -> bytes | None:
        """The answer, or None: nobody answered. Any answer but 200 and 503 is a fault of the function's."""
        number, self.requests = self.requests, self.requests + 1
        self.counts["request"] += 1
        fate = self.random.random() if self.lost else 1.0
        if self.down or number == self.miss or fate < self.lost / 2:
            return None
        process = self._process()
        token = f"Bearer {who.uid} {who.name} {who.zone}" if who is not None else "Bearer schedule"
        headers = {"Content-Type": "application/json", "Authorization": token}
        self._deep += 1
        before, self._agent = self._agent, who is not None
        try:
            self._pass("", process, number)
            data, status, _ = process.app.handle(Request("POST", path, body, headers))
        except Killed:
            self.end(process)
            return None
        finally:
            self._deep -= 1
            self._agent = before
        if process.dead:
            return None
        if status not in (200, 503):
            self.world.violate("function", f"{path} answered {status}: {data!r}")
        return data if status == 200 and fate >= self.lost else None

    def sync(self, who: Speaker, sync: Sync) -> SyncReply | None:
        data = self.ask("/v1/sync", msgspec.json.encode(sync), who)
        return None if data is None else msgspec.json.decode(data, type=SyncReply)

    def tick(self) -> bool:
        """Whether it was answered, and every job could be looked at."""
        answer = self.ask("/v1/tick", b"{}")
        return answer is not None and b'"failed":0' in answer and b'"busy":false' in answer

    def notify(self, job: str) -> None:
        self.ask(f"/v1/notify/{job}", b"{}")

    # -- the tap

    def passes(self, process: Process, verb: str, before: bool) -> None:
        """Before a call only a dead process is stopped: that moment is the one after the call before it."""
        if process.dead:
            raise Killed
        if self.store_rate and verb in EFFECTS and verb != "perform" and self.random.random() < self.store_rate / 2:
            raise StoreError(f"{verb}: 429, or the answer was lost")
        if verb == "list" and not before and self.world.look_s:
            self.nested(self.world.look_s)
        if not before:
            self._pass(verb, process, self.requests - 1)

    def _pass(self, verb: str, process: Process, request: int) -> None:
        effect = verb in EFFECTS or verb == ""
        if self.points is not None:
            self.points.append(Point(request, verb, effect, self._agent))
        self._at += 1
        if self._at == self.kill_at or (effect and self.kill_rate and self.random.random() < self.kill_rate):
            process.dead = True
            self.kills += 1
            raise Killed
        if self._at == self.stall_at or (effect and self.stall_rate and self.random.random() < self.stall_rate):
            process.frozen += 1
            self.nested(self.stall_s if self._at == self.stall_at else self.random.uniform(1.0, 60.0))
            process.frozen -= 1
            if process.dead:
                raise Killed

    def restart_points(self) -> None:
        """Points are counted from here on."""
        self._at = -1

    def end(self, process: Process) -> None:
        process.dead = True
        if process in self._processes:
            self._processes.remove(process)

    # -- time that passes inside a request

    def sleep(self, seconds: float) -> None:
        if seconds > GATHER_S:  # shorter waits are part of a round's second
            self.counts["waited_s"] += round(seconds)
        self.nested(seconds)

    def nested(self, seconds: float) -> None:
        if self._deep <= DEEPEST:
            self.world.engine.run(self.world.engine.t + seconds)
