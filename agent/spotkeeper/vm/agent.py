"""The agent's loop: what the cloud says, what the function says, what runs here, and the next thing to do.

Threads bring events (``events.py``); this loop alone acts on them. It is level-triggered:
after every event it compares what the document wants with what is there, so a restarted
agent continues like one that never died: an end is said (and spooled) before it is written
down as said. It writes no record, and touches no other machine.
"""

from __future__ import annotations

import os
import queue
import shutil
import time
from dataclasses import dataclass
from dataclasses import replace as changed
from enum import Enum
from pathlib import Path

from msgspec.structs import replace

from spotkeeper.clock import Clock
from spotkeeper.spec.facts import Kind
from spotkeeper.spec.generation import DocState, FactIn, Generation, Member, Progress, Role, SyncReply
from spotkeeper.train.control import Commit
from spotkeeper.vm import notice as notices
from spotkeeper.vm import power, report
from spotkeeper.vm.disk import Disk
from spotkeeper.vm.events import (
    Answered,
    ChildEnded,
    Dropped,
    Event,
    Failed,
    Helped,
    LauncherLost,
    LauncherUp,
    Mounted,
    Observed,
    OutputThere,
    SourceReady,
    SourcesGone,
    Terminated,
    Unmounted,
)
from spotkeeper.vm.helper import Helper
from spotkeeper.vm.kept import Kept
from spotkeeper.vm.launch import SAVER_SOCKET, Launcher, LaunchError
from spotkeeper.vm.lease import BootWatch, Lease
from spotkeeper.vm.log import Log
from spotkeeper.vm.logs import Task, Uploader, object_name, whose
from spotkeeper.vm.memory import give_back
from spotkeeper.vm.metadata import Instance, Metadata, Watcher
from spotkeeper.vm.mounting import Mounting
from spotkeeper.vm.output import FAILED, Outputs
from spotkeeper.vm.ready import Ready
from spotkeeper.vm.render import RenderError
from spotkeeper.vm.saved import Assignment, Saved
from spotkeeper.vm.sdnotify import notify, watchdog_s
from spotkeeper.vm.settings import Settings, job_path, templates_path
from spotkeeper.vm.storage import Bucket
from spotkeeper.vm.supervisor import Ending, Node, Supervisor
from spotkeeper.vm.sync import POLL_S, FunctionClient, Outbox, Syncer

KILLED = 137  # what a shell shows for SIGKILL: the job's processes went with their launcher
SHUTDOWN_S = 25.0  # virtual; of the 30 s a cloud gives from ACPI power-off to the end, some is the system's own
RESERVE_S = 8.0  # real; detect, agree, hash, report (and never more than a quarter of the notice)
LAST_WORDS_S = 5.0  # real; facts unsaid for longer stay in the spool
SAVER_END_S = 20.0  # real; for a save in hand
PAUSE_IDLE_S = 5.0  # real pauses of the loop when no event comes
PAUSE_RUNNING_S = 0.5
PAUSE_AWAITING_S = 0.1


class State(Enum):
    """What this machine is doing.

    ========== ========== ===========================================================
    from       to         on
    ========== ========== ===========================================================
    BOOT       HELLO      the settings are read
    HELLO      IDLE       the function knows it as a static node without a job
    HELLO      STANDBY    the record knows it as an attempt of a rank
    IDLE       STANDBY    a job was granted this node
    STANDBY    RUNNING    a document lists it, and source, launcher and disk are there
    RUNNING    SAVING     save_stop; its own notice runs out; lease over; machine going down
    RUNNING    RUNNING    a newer generation lists it: end the old one, start the new one
    RUNNING    STOPPED    the job ended by itself (said as exit, or released); what it left is in the bucket
    SAVING     STOPPED    the processes are gone (said as released)
    STOPPED    RUNNING    a newer generation lists it
    any        SUPERSEDED superseded or done: end, unmount, say freed (static: dropped)
    SUPERSEDED IDLE       a static node has said dropped; any other machine powers off
    ========== ========== ===========================================================
    """

    BOOT = "boot"
    HELLO = "hello"
    STANDBY = "standby"
    RUNNING = "running"
    SAVING = "saving"
    STOPPED = "stopped"
    SUPERSEDED = "superseded"
    IDLE = "idle"


# States in which something is awaited of the function: poll fast.
_AWAITING = {State.BOOT, State.HELLO, State.STANDBY, State.SAVING, State.STOPPED, State.SUPERSEDED}


class Then(Enum):
    """What follows once this machine has let go of its job."""

    POWER_OFF = "power off"
    IDLE = "idle"
    EXIT = "exit"  # the system goes down anyway


@dataclass
class Leaving:
    """Letting go: end the job, end launcher and saver, unmount, say so, then ``then``."""

    why: str
    then: Then
    save: bool
    deadline: float | None = None  # real unix seconds, of the save
    attempt: int | None = None  # as the function knows it: an earlier boot's, where this one has none
    over: bool = False  # its job has ended: what a static node's disk has of it goes too
    began: float | None = None  # monotonic, once the job has ended
    unmounted: bool = False
    said_at: float | None = None  # monotonic


class Agent:
    """One machine's agent; :meth:`run` returns the process's exit code."""

    def __init__(self, settings: Settings, metadata: Metadata, clock: Clock, log: Log) -> None:
        self._set = settings
        self._metadata = metadata
        self._clock = clock
        self._log = log
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        post = self._inbox.put
        bucket = Bucket(settings.storage, settings.bucket, metadata)
        self._outbox = Outbox(settings.state / "spool", settings.boot, log)
        client = FunctionClient(settings.function, metadata)
        self._sync = Syncer(client, self._outbox, settings.boot, post, clock, log)
        self._helper = Helper(post, log)
        self._uploader = Uploader(bucket, clock, log)
        self._mounting = Mounting(Disk(settings.device, settings.mount, log), self._helper, self._say, clock, log)
        self._kept = Kept()
        self._launcher = Launcher(settings.run, job_path(), post, log)
        self._ready = Ready(settings, bucket, self._launcher, self._helper)
        self._super = Supervisor(settings.run, templates_path(), self._launcher, log)
        carrier = Helper(post, log, "output")  # its own: a mount must not wait for an upload
        self._output = Outputs(bucket, carrier, settings.mount, settings.state / "out", clock, log)
        self._lease = Lease(clock.steady())
        self._boot_watch = BootWatch(clock.steady(), clock.scale, settings.run / "known")
        self._saved = Saved.read(settings.run, settings.boot)
        self._state = State.BOOT
        self._doc: Generation | None = None
        self._reporter: report.Reporter | None = None
        self._leaving: Leaving | None = None
        self._unsaid: Ending | None = None  # of a job that ended well: said once its output is in the bucket
        self._notice_saved = False  # the save at the notice has been asked for
        self._repeat_at = 0.0  # steady
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
        self._uploader.flush(LAST_WORDS_S)
        return self._exit

    # ------------------------------------------------------------------ the loop's parts

    def _begin(self) -> None:
        Watcher(self._metadata, lambda seen: self._inbox.put(Observed(seen)), self._clock, self._log).start()
        self._helper.start()
        self._output.helper.start()
        self._uploader.start()
        self._become(State.HELLO)
        if self._saved.assignment is not None:
            self._log("agent.again", job=self._saved.assignment.job, started=self._saved.started)
            self._ready.greet_when_warm()  # the one before may have died before it said so
        if self._saved.notice is not None:
            self._say(Kind.NOTICE, str(self._saved.notice.deadline))  # written down, but said?
        if self._set.static:
            self._say(Kind.HELLO, gen=0)
        self._sync.start()
        give_back()
        notify("READY=1", f"STATUS={self._state.value}")

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
        if self._leaving is not None or self._state in (State.STANDBY, State.STOPPED):
            pause = PAUSE_AWAITING_S
        elif self._super.child is not None or self._unsaid is not None:
            pause = PAUSE_RUNNING_S
        else:
            pause = PAUSE_IDLE_S
        if self._saved.notice is not None:
            pause = min(pause, PAUSE_AWAITING_S)
        return min(pause, watchdog_s() or pause)

    def _handle(self, event: Event) -> None:
        match event:
            case Answered(reply, asked):
                self._answered(reply)
                self._drop_ended(asked, reply.ended)
            case Observed(instance):
                self._observed(instance)
            case LauncherUp(gen, code):
                self._launcher_up(gen, code)
            case LauncherLost(reason, text):
                self._launcher_lost(reason, text)
            case ChildEnded(gen, code, left):
                self._child_ended(gen, code, left)
            case SourceReady() | SourcesGone() | Mounted() | Unmounted() | Dropped() | OutputThere() | Failed():
                self._helped(event)
            case Terminated():
                self._terminated()

    def _helped(self, event: Helped) -> None:
        """The helper's thread has done a piece of work, or failed at it."""
        match event:
            case SourceReady(_, folder):
                self._helper.done("source")
                self._ready.source = folder
            case SourcesGone():
                self._helper.done("sources")
            case Mounted():
                self._helper.done("mount")
                self._mounting.mounted(event)
                self._kept.found(event.jobs)
                self._tell_disk()
            case Unmounted():
                self._helper.done("unmount")
                self._mounting.number = None
                if self._leaving is not None:
                    self._leaving.unmounted = True
            case Dropped(jobs):
                self._helper.done("drop")
                self._log("disk.dropped", jobs=jobs)
                self._kept.gone(jobs)
            case OutputThere():
                if self._output.done(event):
                    self._ended(0, "\n".join(f"not kept of SPOTKEEPER_OUTPUT: {line}" for line in event.left_out))
            case Failed("output", error, _):
                if why_not := self._output.failed(error):
                    self._ended(FAILED, f"spotkeeper: {why_not}")
            case Failed(what, error, why):
                self._helper.done(what, error)
                if what == "mount":
                    self._mounting.failed(self._disk_number(), why)

    def _advance(self) -> None:
        """Compare what is wanted with what is there; start what is missing."""
        if self._leaving is not None:
            self._leave(self._leaving)
        else:
            self._check_lease()
            self._prepare()
            self._look_at_disk()
            self._drive_child()
            self._carry_output()
            self._heed_notice()
        self._super.tick()

    def _tell(self) -> None:
        """Hand what the next exchange with the function needs to its thread."""
        child, progress, slow = self._super.child, None, False
        if child is not None and self._reporter is not None:
            progress = self._reporter.progress(child.control, self._clock.now())
            slow = self._reporter.late(child.control, time.monotonic())
            for fact in self._reporter.facts(child.control, time.monotonic()):
                self._sync.say(fact)
        elif self._unsaid is not None:
            progress = self._output.beat()
        pending = self._state in _AWAITING or self._saved.notice is not None or slow
        job = self._saved.assignment.job if self._saved.assignment else None
        self._sync.want(self._doc.ver if self._doc else 0, job, pending, progress)
        if self._set.static and (question := self._kept.question(self._clock.steady(), job)):
            self._sync.ask(question)
        notify("WATCHDOG=1")

    # ------------------------------------------------------------------ what the function says

    def _answered(self, reply: SyncReply) -> None:
        self._lease.renew(self._clock.steady(), reply.lease_minutes)
        if reply.role is not Role.UNKNOWN:
            self._boot_watch.disarm()
        if self._leaving is not None:
            return
        match reply.role:
            case Role.UNKNOWN:
                if self._set.static:
                    self._say(Kind.HELLO, gen=0, again=True)
            case Role.SUPERSEDED:
                then = Then.IDLE if self._set.static else Then.POWER_OFF
                self._start_leaving("superseded", then, attempt=reply.attempt, over=reply.over)
            case Role.IDLE:
                if self._saved.assignment is None:
                    self._become(State.IDLE)
                else:
                    self._start_leaving("its job is over", Then.IDLE)
            case Role.STANDBY | Role.MEMBER:
                self._assigned(reply)

    def _drop_ended(self, asked: tuple[str, ...], ended: tuple[str, ...]) -> None:
        """Jobs that ended while their checkpoints lay here and this node served another, or none."""
        serving = self._saved.assignment.job if self._saved.assignment else None
        over = self._kept.over(asked, ended, serving)
        if over and self._set.static and self._leaving is None:
            self._mounting.drop(over)

    def _assigned(self, reply: SyncReply) -> None:
        if reply.job is None or reply.rank is None or reply.attempt is None:
            self._log.once("role", "sync.odd", role=reply.role.value, detail="a role without job, rank and attempt")
            return
        assignment = Assignment(reply.job, reply.rank, reply.attempt, reply.disk)
        if not assignment.same_life(self._saved.assignment):
            self._log("assigned", job=reply.job, rank=reply.rank, attempt=reply.attempt)
            self._forget_job()
            self._sync.assigned(reply.job)
            self._save(assignment=assignment)
            self._ready.greet_when_warm()
        self._save(assignment=assignment, run=reply.run or self._saved.run)
        if reply.role is Role.STANDBY:
            self._repeat()
        if self._state in (State.BOOT, State.HELLO, State.IDLE):
            self._become(State.STANDBY if self._super.child is None else State.RUNNING)
        if reply.doc is not None and (self._doc is None or reply.doc.ver > self._doc.ver):
            self._take(reply.doc)

    def _repeat(self) -> None:
        """Until a machine is admitted the function takes only its hello: say again what is still so."""
        now = self._clock.steady()
        if now < self._repeat_at:
            return
        self._repeat_at = now + POLL_S
        if self._saved.notice is not None:
            self._say(Kind.NOTICE, str(self._saved.notice.deadline), again=True)
        self._mounting.tell(again=True)

    def _take(self, doc: Generation) -> None:
        self._log("doc", ver=doc.ver, gen=doc.gen, state=doc.state.value, members=len(doc.members))
        self._doc = doc
        if doc.state is DocState.ROLL_CALL:
            self._say(Kind.HERE, str(doc.ver))
        if doc.state is DocState.DONE:
            self._start_leaving("the job is done", Then.IDLE if self._set.static else Then.POWER_OFF)

    def _me(self, doc: Generation) -> tuple[int, Member] | None:
        """This machine's place in a document; another boot of it is another member."""
        for index, member in enumerate(doc.members):
            if (member.uid, member.boot) == (self._set.uid, self._set.boot):
                return index, member
        return None

    def _check_lease(self) -> None:
        if self._boot_watch.over(self._clock.steady()) and not self._set.static and self._saved.assignment is None:
            self._start_leaving("nobody has taken it in since its boot", Then.POWER_OFF)
            return
        if not self._lease.over(self._clock.steady()):
            self._log.over("lease", "lease.well")
            return
        self._log.once("lease", "lease.over", minutes=self._lease.minutes)
        if self._set.static:
            self._super.save_and_stop(None)  # it costs no more than it did; it keeps asking
        else:
            self._start_leaving("no word from the function", Then.POWER_OFF, save=True)

    # ------------------------------------------------------------------ getting ready

    def _prepare(self) -> None:
        assignment, run = self._saved.assignment, self._saved.run
        if assignment is not None and run is not None:
            self._ready.prepare(assignment.job, run)
        if self._ready.may_greet():
            self._say(Kind.HELLO, gen=0)

    def _look_at_disk(self) -> None:
        """A dynamic VM's disk comes with its number, after promotion."""
        assignment = self._saved.assignment
        if assignment is None or (assignment.disk is None and not self._set.static):
            return
        place = self._me(self._doc) if self._doc is not None else None
        attached = place is not None and place[1].disk
        self._mounting.look(assignment.disk or 0, self._ckpt(assignment.job), attached)

    def _disk_number(self) -> int | None:
        """Of the disk that is ours to mount, while there is a job; 0: a static node's own."""
        return None if self._saved.assignment is None else self._saved.assignment.disk or 0

    def _tell_disk(self) -> None:
        """A job that began without its disk writes there from the next save on."""
        if self._super.child is not None and self._mounting.number is not None:
            self._super.child.control.disk = True

    def _ckpt(self, job: str) -> Path:
        return self._set.mount / job / "ckpt"

    # ------------------------------------------------------------------ the launcher

    def _launcher_up(self, gen: int | None, code: int | None) -> None:
        """A fresh launcher has run nothing. One that an agent before this one used may hold our child."""
        saved = self._saved
        if self._super.child is not None or self._unsaid is not None:
            return
        if saved.started <= saved.ended:
            self._find_again(gen, code)
            return
        if gen == saved.started and saved.assignment is not None and saved.run is not None:
            adopted = self._super.adopt(saved.assignment.job, gen, saved.run.nproc, saved.run.grace_s)
            if adopted and code is None:
                self._become(State.RUNNING)
                return
            if adopted and code is not None:
                self._child_ended(gen, code, 0)
                return
            self._launcher.quit()  # a run that cannot be steered is none
        self._super.sweep()
        self._lost(saved.started)

    def _find_again(self, gen: int | None, code: int | None) -> None:
        """What was written down was lost, or is old (a full disk): a launcher that runs a generation knows better."""
        assignment, run = self._saved.assignment, self._saved.run
        if gen is None or code is not None or assignment is None or run is None:
            return
        self._log("job.found", gen=gen)
        if self._super.adopt(assignment.job, gen, run.nproc, run.grace_s):
            self._save(started=gen)
            self._become(State.RUNNING)
        else:
            self._launcher.quit()  # a run that cannot be steered is none

    def _launcher_lost(self, reason: str, text: str) -> None:
        self._log("launcher.lost", reason=reason)
        child = self._super.child
        self._ready.launcher_lost(at_once=child is not None)
        self._super.sweep()
        if child is not None:
            self._child_ended(child.gen, KILLED, 0)
            return
        doc = self._doc
        if doc is not None and self._wanted(doc) and self._saved.started < doc.gen:
            # It cannot be started at all (no such Python, no torch): the job's crash budget decides.
            self._save(started=doc.gen)
            self._follow_log(doc.gen, f"{reason}\n{text}")
            self._lost(doc.gen, 1)

    def _lost(self, gen: int, code: int = KILLED) -> None:
        self._say(Kind.EXIT, str(code), gen=gen)
        self._save(ended=gen)

    # ------------------------------------------------------------------ the child

    def _wanted(self, doc: Generation) -> bool:
        return doc.state in (DocState.RUN, DocState.ROLL_CALL) and self._me(doc) is not None

    def _drive_child(self) -> None:
        doc, child = self._doc, self._super.child
        if doc is None:
            return
        if child is None:
            self._without_child(doc)
        elif doc.gen > child.gen or self._me(doc) is None:
            self._super.discard()  # its peers are gone or go; what it holds is on the disks
        elif doc.state is DocState.SAVE_STOP:
            self._become(State.SAVING)
            self._super.save_and_stop(self._real(doc.deadline))
        elif self._reporter is None:
            self._reporter = report.Reporter.of(doc, self._rank())

    def _without_child(self, doc: Generation) -> None:
        place = self._me(doc)
        if place is None or self._saved.started > self._saved.ended:
            return  # what an agent before this one started is not accounted for yet
        if self._wanted(doc) and self._saved.started < doc.gen:
            self._start(doc, *place)
        elif doc.state is DocState.SAVE_STOP:
            # It ended before the word came, or had not begun: either way nothing of it runs.
            self._say(Kind.RELEASED, self._step(None), gen=doc.gen)

    def _start(self, doc: Generation, index: int, member: Member) -> None:
        run, assignment = self._saved.run, self._saved.assignment
        if run is None or assignment is None or self._ready.source is None or not self._launcher.up:
            return
        if member.disk and self._mounting.number is None:
            self._log.once("disk", "disk.awaited", gen=doc.gen)
            return
        self._log.over("disk", "disk.there")
        ckpt = self._ckpt(assignment.job)
        saver, out = self._set.run / SAVER_SOCKET, self._output.folder(assignment.job, disk=member.disk)
        node = Node(assignment.rank, index, member.address, self._ready.source, saver, ckpt, out, late=not member.disk)
        self._save(started=doc.gen)  # before: an agent that dies now finds a generation that did not end well
        try:
            self._super.start(doc, run, node)
        except (LaunchError, RenderError, OSError) as error:
            self._log("job.start.failed", gen=doc.gen, error=str(error))
            self._follow_log(doc.gen, str(error))
            self._launcher.quit()
            self._lost(doc.gen, 1)
            return
        self._tell_disk()
        self._reporter = report.Reporter.of(doc, assignment.rank)
        self._notice_saved = False
        self._become(State.RUNNING)
        self._follow_log(doc.gen)
        give_back()

    def _child_ended(self, gen: int, code: int, left: int) -> None:
        child, reporter = self._super.child, self._reporter
        if child is None or child.gen != gen:
            return
        if left:
            self._log("job.left", gen=gen, count=left)
        last = reporter.progress(child.control, self._clock.now(), last=True) if reporter else None
        life = report.Reporter(gen, True).progress(child.control, self._clock.now(), last=True)
        ending = self._super.ended(gen, code)
        if ending is None:
            return
        self._reporter, self._unsaid = None, ending
        job, rank = child.folder.parent.name, self._rank()
        self._sync.want(self._doc.ver if self._doc else 0, job, True, last)
        if not (ending.well and self._output.begin(job, rank, gen, life or Progress(gen, 0, self._clock.now()))):
            self._ended(ending.code)

    def _ended(self, code: int, words: str = "") -> None:
        """All that the end of the job asks for is done: it is said, and written down. ``words``: for its log."""
        ending, self._unsaid = self._unsaid, None
        if ending is None:
            return
        if words:
            self._follow_log(ending.gen, words)
        if not ending.discarded:
            self._say_ending(changed(ending, code=code))
        self._save(ended=ending.gen)
        self._become(State.STOPPED)
        self._uploader.rest()

    def _carry_output(self) -> None:
        """Until what the job left is in the bucket, unless a newer generation begins: that ends the job anew."""
        ending, doc = self._unsaid, self._doc
        if ending is None:
            return
        if doc is not None and doc.gen > ending.gen:
            self._output.drop()
            if not self._output.busy:  # the next one writes to the same folder
                self._unsaid = changed(ending, discarded=True)
                self._ended(ending.code)
            return
        self._output.go_on()

    def _say_ending(self, ending: Ending) -> None:
        if ending.commit is not None:
            self._mounting.wrote(ending.commit, ending.gen)
        if ending.stopped:
            self._say(Kind.RELEASED, self._step(ending.commit), gen=ending.gen)
        else:
            self._say(Kind.EXIT, str(ending.code), gen=ending.gen)

    def _step(self, commit: Commit | None) -> str:
        commit = commit or self._mounting.newest
        return "0" if commit is None else str(commit.step)

    def _follow_log(self, gen: int, extra: str = "") -> None:
        assignment = self._saved.assignment
        if assignment is not None:
            folder = self._super.folder(assignment.job, gen)
            who = whose(assignment.rank, self._set.name)
            self._uploader.follow(Task(object_name(assignment.job, assignment.rank, gen), folder, extra, who))

    # ------------------------------------------------------------------ notices and the end

    def _observed(self, instance: Instance) -> None:
        known, now = self._saved.notice, self._clock.now()
        change = notices.observe(known, instance, self._set.notice_s, now)
        if change.withdrawn is not None:
            self._log("notice.withdrawn", cause=change.withdrawn.cause.value)
            self._say(Kind.REPRIEVE, str(change.withdrawn.deadline))
            self._save(notice=None)
        if change.given is not None:
            self._give(change.given)

    def _give(self, given: notices.Notice) -> None:
        self._log("notice", cause=given.cause.value, within_s=round(given.deadline - self._clock.now(), 1))
        self._save(notice=given)
        self._notice_saved = False
        self._say(Kind.NOTICE, str(given.deadline))

    def _heed_notice(self) -> None:
        """Save at once and go on; save and stop when the time left is what a save takes, with a reserve.

        A notice too short for two saves gets one. Most often the function says stop first,
        when the replacement stands by.
        """
        given, child = self._saved.notice, self._super.child
        if given is None or child is None or child.saving:
            return
        left_s = self._clock.real_s(given.deadline - self._clock.now())
        reserve_s = min(RESERVE_S, 0.25 * self._clock.real_s(given.deadline - given.at))
        need_s = 1.5 * child.control.save_s + 2 * child.control.step_s + reserve_s
        if left_s <= need_s:
            self._become(State.SAVING)
            self._super.save_and_stop(time.time() + max(0.0, left_s - 0.25 * reserve_s))
        elif not self._notice_saved and left_s > need_s + child.control.save_s:
            self._notice_saved = True
            self._super.save()

    def _terminated(self) -> None:
        """SIGTERM: the machine goes down, or somebody restarts the agent, which stops no training."""
        if not power.shutting_down():
            self._log("agent.stop", job_goes_on=self._super.child is not None)
            self._exit = 0
            return
        given = notices.shutdown(self._saved.notice, SHUTDOWN_S, self._clock.now())
        left_s = self._clock.real_s(given.deadline - self._clock.now())
        notify("STOPPING=1", f"EXTEND_TIMEOUT_USEC={int((left_s + LAST_WORDS_S) * 1e6)}")
        if self._leaving is not None:
            self._leaving.then = Then.EXIT
            return
        self._give(given)
        self._start_leaving("the machine goes down", Then.EXIT, save=True, deadline=time.time() + 0.8 * left_s)

    def _start_leaving(
        self,
        why: str,
        then: Then,
        *,
        save: bool = False,
        deadline: float | None = None,
        attempt: int | None = None,
        over: bool = False,
    ) -> None:
        self._log("leave", why=why, then=then.value)
        self._leaving = Leaving(why, then, save, deadline, attempt, over)

    def _leave(self, leaving: Leaving) -> None:
        """One step of letting go; called until there is nothing left to do."""
        if self._super.child is not None:
            self._become(State.SAVING if leaving.save else State.SUPERSEDED)
            self._super.save_and_stop(leaving.deadline) if leaving.save else self._super.discard()
            return
        if not self._end_output(leaving):
            return
        self._become(State.SUPERSEDED)
        if not self._end_helpers(leaving):
            return
        if not leaving.unmounted:
            self._mounting.unmount(self._ended_job() if leaving.over else None)
            return
        self._say_goodbye(leaving)

    def _end_output(self, leaving: Leaving) -> bool:
        """True once nothing reads the job's files for the bucket. A machine that goes down uses the time it has."""
        if self._unsaid is not None and leaving.deadline is not None and time.time() < leaving.deadline:
            self._carry_output()
            return False
        self._unsaid = None
        self._output.drop()
        return not self._output.busy

    def _ended_job(self) -> Path | None:
        """A static node's disk outlives its jobs: what it has of one that is over. A rank's disk goes as a whole."""
        assignment = self._saved.assignment
        return self._set.mount / assignment.job if self._set.static and assignment is not None else None

    def _end_helpers(self, leaving: Leaving) -> bool:
        """End launcher and saver; True once both are gone, so that nothing uses the disk."""
        if leaving.began is None:
            leaving.began = time.monotonic()
            self._launcher.quit()
            self._super.sweep()
        hurry = time.monotonic() - leaving.began > SAVER_END_S
        return self._ready.end_saver(hurry) and (self._launcher.gone or hurry)

    def _say_goodbye(self, leaving: Leaving) -> None:
        assignment = self._saved.assignment
        if leaving.said_at is None:
            leaving.said_at = time.monotonic()
            if assignment is not None:
                self._say(Kind.FREED, str(assignment.disk or 0))
            attempt = assignment.attempt if assignment is not None else leaving.attempt
            if attempt is not None and leaving.then is Then.IDLE:
                self._sync.say(FactIn(Kind.DROPPED, self._gen(), attempt=attempt), again=assignment is None)
        patience = time.monotonic() - leaving.said_at
        # A static node's grant ends with its word alone, so it says it until it is heard.
        if self._sync.unsaid() and (leaving.then is Then.IDLE or patience < LAST_WORDS_S):
            return
        self._leaving = None
        if leaving.then is Then.IDLE:
            self._forget_job()
            if leaving.over and assignment is not None:
                self._kept.gone((assignment.job,))
            self._save(assignment=None, run=None, started=-1, ended=-1)
            self._sync.assigned(None)
            self._ready.forget_sources()
            self._become(State.IDLE)
            return
        if leaving.then is Then.POWER_OFF:
            power.off(self._log)
        self._exit = 0

    def _forget_job(self) -> None:
        """Another job, another attempt: nothing of the last one counts."""
        assignment = self._saved.assignment
        if assignment is not None:
            self._kept.left(assignment.job)
            shutil.rmtree(self._set.run / assignment.job, ignore_errors=True)
            self._output.drop()
            self._output.forget(assignment.job)
        self._doc = None
        self._reporter = self._unsaid = None
        self._ready.forget_job()
        self._mounting.forget_job()
        self._save(started=-1, ended=-1, run=None)

    # ------------------------------------------------------------------ small things

    def _say(self, kind: Kind, value: str = "0", *, gen: int | None = None, again: bool = False) -> None:
        self._sync.say(FactIn(kind, self._gen() if gen is None else gen, value), again=again)

    def _gen(self) -> int:
        return self._doc.gen if self._doc is not None else max(0, self._saved.started)

    def _rank(self) -> int:
        return self._saved.assignment.rank if self._saved.assignment is not None else -1

    def _real(self, deadline: float | None) -> float | None:
        """A virtual time as real unix seconds."""
        return None if deadline is None else time.time() + self._clock.real_s(deadline - self._clock.now())

    def _become(self, state: State) -> None:
        if state is not self._state:
            self._log("state", was=self._state.value, now=state.value)
            self._state = state
            notify(f"STATUS={state.value}")

    def _save(self, **changes: object) -> None:
        saved = replace(self._saved, **changes)
        if saved == self._saved:
            return
        self._saved = saved
        try:
            saved.write(self._set.run)
        except OSError as error:
            self._log.once(f"saved {error.errno}", "state.trouble", error=str(error), at=os.fspath(self._set.run))
