"""The agent's loop: receives events of the cloud, the function and the job, and acts on them.

Threads post events (``core/events.py``); only this loop acts on them. It is level-triggered: after every event it
compares the newest document with the running processes, so a restarted agent continues where its predecessor stopped.
The agent writes no record and affects no other machine. The docstring of ``agent/__init__.py`` lists the files.
"""

from __future__ import annotations

import queue
import time

from spotkeeper.clock import Clock
from spotkeeper.contract.facts import Kind
from spotkeeper_agent.agent.assignment import ReplyHandler
from spotkeeper_agent.agent.components import Components
from spotkeeper_agent.agent.hang import HangWatch
from spotkeeper_agent.agent.membership import Membership
from spotkeeper_agent.agent.notices import NoticeHandler
from spotkeeper_agent.agent.teardown import LAST_WORDS_S, Departure, Teardown, Then
from spotkeeper_agent.cloud import notice as notices
from spotkeeper_agent.cloud.metadata import Metadata, Watcher
from spotkeeper_agent.core.events import (
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
    MetricsThere,
    MirrorThere,
    Mounted,
    NoCopy,
    Observed,
    OutputThere,
    SecretsRead,
    SourceReady,
    Terminated,
    Unfit,
    Unmounted,
    WorkEnded,
)
from spotkeeper_agent.core.log import Log
from spotkeeper_agent.core.settings import Settings
from spotkeeper_agent.core.state import AgentState, MachineState
from spotkeeper_agent.core.sync import FunctionClient, Outbox, Syncer
from spotkeeper_agent.host import memory, systemd
from spotkeeper_agent.host.systemd import notify
from spotkeeper_agent.preflight import Fitness

SHUTDOWN_S = 25.0  # virtual; a cloud gives 30 s after ACPI power-off, and the system needs some
NEAR_S = 600.0  # virtual; an upgrade waits if a notice ends within this time, but not for a rebalance signal
PAUSE_IDLE_S = 5.0  # real seconds that the loop waits for an event
PAUSE_RUNNING_S = 0.5
PAUSE_AWAITING_S = 0.1

# States in which the agent waits for the function and polls fast.
_AWAITING = {
    AgentState.BOOT,
    AgentState.HELLO,
    AgentState.STANDBY,
    AgentState.SAVING,
    AgentState.STOPPED,
    AgentState.SUPERSEDED,
}


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
        self._machine = MachineState(settings, self._sync, clock, log)
        self._components = Components.of(self._machine, metadata, post)
        self._super = self._components.supervisor
        self._membership = Membership(self._machine, self._components)
        self._teardown = Teardown(self._machine, self._components, self._membership)
        self._replies = ReplyHandler(self._machine, self._components, self._membership, self._teardown)
        self._notices = NoticeHandler(self._machine, self._super)
        self._fitness = Fitness(self._machine, metadata)
        self._hang = HangWatch(self._machine, self._super, clock)
        self._exit: int | None = None

    def terminate(self) -> None:
        """Handle SIGTERM. Called from a signal handler."""
        self._inbox.put(Terminated())

    def run(self) -> int:
        """Run until the machine has left its job for good, SIGTERM has come, or a newer agent is ready.

        Returns the exit code.
        """
        self._begin()
        while self._exit is None:
            for event in self._next_events():
                self._handle(event)
            self._advance()
            self._report()
        self._components.uploader.flush(LAST_WORDS_S)
        self._components.metrics.flush(LAST_WORDS_S)
        return self._exit

    def _begin(self) -> None:
        saved = self._machine.saved
        Watcher(self._metadata, lambda seen: self._inbox.put(Observed(seen)), self._clock, self._log).start()
        self._components.start()
        self._machine.become(AgentState.HELLO)
        if saved.assignment is not None:
            self._log("agent.again", job=saved.assignment.job, started=saved.started)
            self._components.preparation.greet_when_warm()  # the previous agent may have died before its hello
        if saved.notice is not None:
            self._machine.say(Kind.NOTICE, str(saved.notice.deadline))  # stored, but perhaps not reported
        if self._set.static:
            self._machine.say(Kind.HELLO, gen=0)
        self._sync.start()
        self._fitness.begin()
        memory.trim()
        notify("READY=1", f"STATUS={self._machine.state.value}")

    # ------------------------------------------------------------------ what has happened

    def _next_events(self) -> list[Event]:
        """Wait for an event, at most :meth:`_pause_s`; return all events in the inbox."""
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
        if self._teardown.departure is not None or self._machine.state in (AgentState.STANDBY, AgentState.STOPPED):
            pause = PAUSE_AWAITING_S
        elif self._super.child is not None or self._membership.unreported is not None:
            pause = PAUSE_RUNNING_S
        else:
            pause = PAUSE_IDLE_S
        notice = self._machine.saved.notice
        if (notice is not None and notice.urgent) or self._hang.waits:
            pause = min(pause, PAUSE_AWAITING_S)
        return min(pause, systemd.watchdog_s() or pause)

    def _handle(self, event: Event) -> None:
        match event:
            case Answered(reply, asked):
                self._replies.answered(reply, asked)
                self._components.upgrade.heard(reply.bundle, serving=self._machine.job is not None)
            case WorkEnded(helper, what, ended):
                helper.done(what, ended)
                self._handle(ended)
            case SecretsRead():
                self._components.secrets.read(event)
            case Failed("secrets", error, _):
                self._components.secrets.failed(error)
            case BundleReady(folder):
                self._components.upgrade.ready(folder)
            case Observed(instance):
                self._notices.observed(instance)
            case LauncherUp(gen, code):
                self._membership.launcher_up(gen, code)
            case LauncherLost(reason, text):
                self._membership.launcher_lost(reason, text)
            case ChildEnded(gen, code, left):
                self._membership.child_ended(gen, code, left)
            case Terminated():
                self._terminated()
            case MirrorThere() | Unfit() | Fetched() | NoCopy() | Failed("mirror" | "fetch"):
                self._components.mirror.helped(event, self._machine, self._components.mounting)
            case _:
                self._helped(event)

    def _helped(self, event: Helped) -> None:
        """Handle the event with which a helper thread's work has ended."""
        parts = self._components
        match event:
            case SourceReady(folder):
                parts.preparation.source = folder
            case Mounted():
                parts.mounting.mounted(event)
                parts.old_jobs.found(event.jobs)
                self._membership.tell_disk()
            case Unmounted():
                self._teardown.unmounted()
            case Dropped(jobs):
                self._log("disk.dropped", jobs=jobs)
                parts.old_jobs.gone(jobs)
            case MetricsThere():
                parts.metrics.stored(event, self._super.child)
            case OutputThere():
                self._membership.output_there(event)
            case Failed("output", error, _):
                self._membership.output_failed(error)
            case Failed("mount", _, why):
                parts.mounting.failed(self._disk_number(), why)

    def _terminated(self) -> None:
        """Handle SIGTERM: if the machine shuts down, begin a teardown; if only the agent is restarted, just exit."""
        if not systemd.shutting_down():
            self._log("agent.stop", job_goes_on=self._super.child is not None)
            self._exit = 0
            return
        given = notices.shutdown(self._machine.saved.notice, SHUTDOWN_S, self._clock.now())
        left_s = self._clock.real_s(given.deadline - self._clock.now())
        notify("STOPPING=1", f"EXTEND_TIMEOUT_USEC={int((left_s + LAST_WORDS_S) * 1e6)}")
        if self._teardown.departure is not None:
            self._teardown.departure.then = Then.EXIT
            return
        self._notices.give(given)
        deadline = time.time() + 0.8 * left_s
        self._teardown.begin(Departure("the machine goes down", Then.EXIT, save=True, deadline=deadline))

    # ------------------------------------------------------------------ what to do next

    def _advance(self) -> None:
        """Compare the wanted state with the running processes, and take the next steps."""
        if self._teardown.departure is not None:
            if self._teardown.go_on():
                self._exit = 0
        else:
            self._replies.check_silence()
            self._prepare()
            self._mount_disk()
            self._membership.drive()
            self._membership.upload_output()
            self._notices.act()
            self._fitness.go_on()
            self._hang.go_on()
            self._components.usage.advance()
            self._components.mirror.advance(self._machine, self._super.child, self._components.mounting)
        self._membership.upload_metrics()
        self._super.tick()
        if self._components.upgrade.folder is not None and self._may_upgrade():
            self._exit = 0

    def _may_upgrade(self) -> bool:
        """Whether a newer agent may take over now.

        Not during a stop or a teardown, with a notice's deadline within ``NEAR_S``, before the end of a generation is
        reported, or while the helper thread does work that the newer agent would begin again.
        """
        busy = any(map(self._components.helper.busy, ("mount", "unmount", "drop", "source", "sources")))
        notice = self._machine.saved.notice
        near = notice is not None and notice.deadline < self._clock.now() + NEAR_S
        quiet = self._teardown.departure is None and not near and self._super.next_tick_s() is None
        return quiet and not busy and self._membership.unreported is None

    def succeed(self) -> None:
        """Replace this process by the newer agent, if one is ready. Call it only after :meth:`run`. Raises OSError."""
        if self._teardown.departure is None:
            self._components.upgrade.succeed()

    def _prepare(self) -> None:
        assignment, run = self._machine.saved.assignment, self._machine.saved.run
        if assignment is not None and run is not None:
            mounted = self._components.mounting.number is not None
            self._components.preparation.mounted(
                self._machine.ckpt(assignment.job).with_name("env") if mounted else None
            )
            self._components.preparation.prepare(assignment.job, run)
            self._components.secrets.prepare(run.secrets)
        if self._components.preparation.may_greet():
            self._machine.say(Kind.HELLO, gen=0)

    def _mount_disk(self) -> None:
        """Mount the disk once it appears. A machine that is not static gets its disk only after its promotion."""
        assignment, doc = self._machine.saved.assignment, self._machine.doc
        if assignment is None or (assignment.disk is None and not self._set.static):
            return
        place = self._machine.member_of(doc) if doc is not None else None
        attached = place is not None and place[1].disk
        gb = self._machine.saved.run.scratch_gb if self._machine.saved.run is not None else 0
        self._components.mounting.look(assignment.disk or 0, self._machine.ckpt(assignment.job), attached, gb)

    def _disk_number(self) -> int | None:
        assignment = self._machine.saved.assignment
        return None if assignment is None else assignment.disk or 0

    def _report(self) -> None:
        """Give the sync thread the progress, facts and questions that the next request shall carry."""
        machine, news = self._machine, self._membership.news()
        for fact in news.facts:
            self._sync.say(fact)
        pending = machine.state in _AWAITING or machine.saved.notice is not None or news.slow
        self._sync.want(machine.ver, machine.job, pending, news.progress)
        if self._set.static and (question := self._components.old_jobs.question(self._clock.steady(), machine.job)):
            self._sync.ask_about(question)
        notify("WATCHDOG=1")
