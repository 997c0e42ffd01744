"""The agent's loop: what the cloud says, what the function says, what runs here, and the next thing to do.

Threads bring events (``events.py``); this loop alone acts on them. It is level-triggered:
after every event it compares what the document wants with what is there, so a restarted
agent continues like one that never died. It writes no record, and touches no other machine.

Who does what: ``standing.py`` what this machine is and says, ``orders.py`` what the function says of it,
``membership.py`` its part in generations, ``heed.py`` notices, ``hang.py`` a job that hangs, ``leaving.py`` letting go
of a job.
"""

from __future__ import annotations

import queue
import time

from spotkeeper.clock import Clock
from spotkeeper.spec.facts import Kind
from spotkeeper.vm import notice as notices
from spotkeeper.vm import power
from spotkeeper.vm.events import (
    Answered,
    BundleReady,
    ChildEnded,
    Dropped,
    Event,
    Failed,
    Fetched,
    Helped,
    LauncherLost,
    LauncherUp,
    MirrorThere,
    Mounted,
    NoCopy,
    Observed,
    OutputThere,
    SecretsRead,
    SourceReady,
    SourcesGone,
    Terminated,
    Unfit,
    Unmounted,
)
from spotkeeper.vm.fitness import Fitness
from spotkeeper.vm.hang import HangWatch
from spotkeeper.vm.heed import Heed
from spotkeeper.vm.leaving import LAST_WORDS_S, Farewell, Leaving, Then
from spotkeeper.vm.log import Log
from spotkeeper.vm.membership import Membership
from spotkeeper.vm.memory import give_back
from spotkeeper.vm.metadata import Metadata, Watcher
from spotkeeper.vm.orders import Orders
from spotkeeper.vm.parts import Parts
from spotkeeper.vm.sdnotify import notify, watchdog_s
from spotkeeper.vm.settings import Settings
from spotkeeper.vm.standing import Standing, State
from spotkeeper.vm.sync import FunctionClient, Outbox, Syncer

SHUTDOWN_S = 25.0  # virtual; of the 30 s a cloud gives from ACPI power-off to the end, some is the system's own
NEAR_S = 600.0  # virtual; a recommendation to rebalance stands for hours, and always ends an hour ahead
PAUSE_IDLE_S = 5.0  # real pauses of the loop when no event comes
PAUSE_RUNNING_S = 0.5
PAUSE_AWAITING_S = 0.1

# States in which something is awaited of the function: poll fast.
_AWAITING = {State.BOOT, State.HELLO, State.STANDBY, State.SAVING, State.STOPPED, State.SUPERSEDED}


class Agent:
    """One machine's agent; :meth:`run` returns the process's exit code."""

    def __init__(self, settings: Settings, metadata: Metadata, clock: Clock, log: Log) -> None:
        self._set = settings
        self._metadata = metadata
        self._clock = clock
        self._log = log
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        post = self._inbox.put
        outbox = Outbox(settings.state / "spool", settings.boot, log)
        client = FunctionClient(settings.function, metadata)
        self._sync = Syncer(client, outbox, settings.boot, post, clock, log)
        self._me = Standing(settings, self._sync, clock, log)
        self._parts = Parts.of(self._me, metadata, post)
        self._super = self._parts.supervisor
        self._membership = Membership(self._me, self._parts)
        self._farewell = Farewell(self._me, self._parts, self._membership)
        self._orders = Orders(self._me, self._parts, self._membership, self._farewell)
        self._heed = Heed(self._me, self._super)
        self._fitness = Fitness(self._me, metadata)
        self._hang = HangWatch(self._me, self._super, clock)
        self._exit: int | None = None

    def terminate(self) -> None:
        """SIGTERM arrived. From a signal handler."""
        self._inbox.put(Terminated())

    def run(self) -> int:
        """Watch, ask, act, until this machine goes or the agent is stopped."""
        self._begin()
        while self._exit is None:
            for event in self._next_events():
                self._handle(event)
            self._advance()
            self._tell()
        self._parts.uploader.flush(LAST_WORDS_S)
        return self._exit

    def _begin(self) -> None:
        saved = self._me.saved
        Watcher(self._metadata, lambda seen: self._inbox.put(Observed(seen)), self._clock, self._log).start()
        self._parts.start()
        self._me.become(State.HELLO)
        if saved.assignment is not None:
            self._log("agent.again", job=saved.assignment.job, started=saved.started)
            self._parts.ready.greet_when_warm()  # the one before may have died before it said so
        if saved.notice is not None:
            self._me.say(Kind.NOTICE, str(saved.notice.deadline))  # written down, but said?
        if self._set.static:
            self._me.say(Kind.HELLO, gen=0)
        self._sync.start()
        self._fitness.begin()
        give_back()
        notify("READY=1", f"STATUS={self._me.state.value}")

    # ------------------------------------------------------------------ what has happened

    def _next_events(self) -> list[Event]:
        """At least a pause, or the events that came during it."""
        try:
            events = [self._inbox.get(timeout=self._pause_s())]
        except queue.Empty:
            return []
        while not self._inbox.empty():
            events.append(self._inbox.get())
        return events

    def _pause_s(self) -> float:
        tick = self._super.next_tick_s()
        if tick is not None:
            return tick
        if self._farewell.leaving is not None or self._me.state in (State.STANDBY, State.STOPPED):
            pause = PAUSE_AWAITING_S
        elif self._super.child is not None or self._membership.unsaid is not None:
            pause = PAUSE_RUNNING_S
        else:
            pause = PAUSE_IDLE_S
        notice = self._me.saved.notice
        if (notice is not None and notice.urgent) or self._hang.waits:
            pause = min(pause, PAUSE_AWAITING_S)
        return min(pause, watchdog_s() or pause)

    def _handle(self, event: Event) -> None:
        match event:
            case Answered(reply, asked):
                self._orders.answered(reply, asked)
                self._parts.upgrade.heard(reply.bundle, serving=self._me.job is not None)
            case SecretsRead():
                self._parts.given.read(event)
            case Failed("secrets", error, _):
                self._parts.given.failed(error)
            case BundleReady(folder):
                self._parts.upgrade.ready(folder)
            case Observed(instance):
                self._heed.observed(instance)
            case LauncherUp(gen, code):
                self._membership.launcher_up(gen, code)
            case LauncherLost(reason, text):
                self._membership.launcher_lost(reason, text)
            case ChildEnded(gen, code, left):
                self._membership.child_ended(gen, code, left)
            case Terminated():
                self._terminated()
            case MirrorThere() | Unfit() | Fetched() | NoCopy() | Failed("mirror" | "fetch"):
                self._parts.mirror.helped(event, self._me, self._parts.mounting)
            case _:
                self._helped(event)

    def _helped(self, event: Helped) -> None:
        """The helper's thread has done a piece of work, or failed at it."""
        parts = self._parts
        match event:
            case SourceReady(_, folder):
                parts.helper.done("source")
                parts.ready.source = folder
            case SourcesGone():
                parts.helper.done("sources")
            case Mounted():
                parts.helper.done("mount")
                parts.mounting.mounted(event)
                parts.kept.found(event.jobs)
                self._membership.tell_disk()
            case Unmounted():
                parts.helper.done("unmount")
                self._farewell.unmounted()
            case Dropped(jobs):
                parts.helper.done("drop")
                self._log("disk.dropped", jobs=jobs)
                parts.kept.gone(jobs)
            case OutputThere():
                self._membership.output_there(event)
            case Failed("output", error, _):
                self._membership.output_failed(error)
            case Failed(what, error, why):
                parts.helper.done(what, error)
                if what == "mount":
                    parts.mounting.failed(self._disk_number(), why)

    def _terminated(self) -> None:
        """SIGTERM: the machine goes down, or somebody restarts the agent, which stops no training."""
        if not power.shutting_down():
            self._log("agent.stop", job_goes_on=self._super.child is not None)
            self._exit = 0
            return
        given = notices.shutdown(self._me.saved.notice, SHUTDOWN_S, self._clock.now())
        left_s = self._clock.real_s(given.deadline - self._clock.now())
        notify("STOPPING=1", f"EXTEND_TIMEOUT_USEC={int((left_s + LAST_WORDS_S) * 1e6)}")
        if self._farewell.leaving is not None:
            self._farewell.leaving.then = Then.EXIT
            return
        self._heed.give(given)
        deadline = time.time() + 0.8 * left_s
        self._farewell.begin(Leaving("the machine goes down", Then.EXIT, save=True, deadline=deadline))

    # ------------------------------------------------------------------ what to do next

    def _advance(self) -> None:
        """Compare what is wanted with what is there; start what is missing."""
        if self._farewell.leaving is not None:
            if self._farewell.go_on():
                self._exit = 0
        else:
            self._orders.heed_silence()
            self._prepare()
            self._look_at_disk()
            self._membership.drive()
            self._membership.carry_output()
            self._heed.heed()
            self._fitness.go_on()
            self._hang.go_on()
            self._parts.mirror.advance(self._me, self._super.child, self._parts.mounting)
        self._super.tick()
        if self._parts.upgrade.folder is not None and self._may_change():
            self._exit = 0

    def _may_change(self) -> bool:
        """Whether another agent may take over now: nothing is under way that it would have to begin anew."""
        busy = any(map(self._parts.helper.busy, ("mount", "unmount", "drop", "source", "sources")))
        notice = self._me.saved.notice
        near = notice is not None and notice.deadline < self._clock.now() + NEAR_S
        quiet = self._farewell.leaving is None and not near and self._super.next_tick_s() is None
        return quiet and not busy and self._membership.unsaid is None

    def succeed(self) -> None:
        """After :meth:`run`: become the agent of another bundle, where one is ready. Raises OSError."""
        if self._farewell.leaving is None:
            self._parts.upgrade.succeed()

    def _prepare(self) -> None:
        assignment, run = self._me.saved.assignment, self._me.saved.run
        if assignment is not None and run is not None:
            mounted = self._parts.mounting.number is not None
            self._parts.ready.mounted(self._me.ckpt(assignment.job).with_name("env") if mounted else None)
            self._parts.ready.prepare(assignment.job, run)
            self._parts.given.prepare(run.secrets)
        if self._parts.ready.may_greet():
            self._me.say(Kind.HELLO, gen=0)

    def _look_at_disk(self) -> None:
        """A dynamic VM's disk comes with its number, after promotion."""
        assignment, doc = self._me.saved.assignment, self._me.doc
        if assignment is None or (assignment.disk is None and not self._set.static):
            return
        place = self._me.place(doc) if doc is not None else None
        attached = place is not None and place[1].disk
        self._parts.mounting.look(assignment.disk or 0, self._me.ckpt(assignment.job), attached)

    def _disk_number(self) -> int | None:
        """Of the disk that is ours to mount, while there is a job; 0: a static node's own."""
        assignment = self._me.saved.assignment
        return None if assignment is None else assignment.disk or 0

    def _tell(self) -> None:
        """Hand what the next exchange with the function needs to its thread."""
        me, news = self._me, self._membership.news()
        for fact in news.facts:
            self._sync.say(fact)
        pending = me.state in _AWAITING or me.saved.notice is not None or news.slow
        self._sync.want(me.ver, me.job, pending, news.progress)
        if self._set.static and (question := self._parts.kept.question(self._clock.steady(), me.job)):
            self._sync.ask(question)
        notify("WATCHDOG=1")
