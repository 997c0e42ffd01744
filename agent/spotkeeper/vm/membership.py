"""This machine's part in the job's generations: begun when a document lists it, ended, and its end said.

It compares the newest document with what runs here, so a restarted agent continues like one that never died. An end
is said (and spooled) before it is written down as said. How processes start and stop is the supervisor's.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from dataclasses import replace as changed

from spotkeeper.spec.facts import Kind
from spotkeeper.spec.generation import DocState, FactIn, Generation, JobRun, Member, Progress
from spotkeeper.train.control import NO_RESTART, Commit
from spotkeeper.vm import report, sick
from spotkeeper.vm.events import OutputThere
from spotkeeper.vm.launch import SAVER_SOCKET, LaunchError
from spotkeeper.vm.logs import Task, object_name, whose
from spotkeeper.vm.memory import give_back
from spotkeeper.vm.output import FAILED
from spotkeeper.vm.parts import Parts
from spotkeeper.vm.recipe import Node
from spotkeeper.vm.render import RenderError
from spotkeeper.vm.standing import Standing, State
from spotkeeper.vm.supervisor import Ending

KILLED = 137  # what a shell shows for SIGKILL: the job's processes went with their launcher


@dataclass(frozen=True)
class News:
    """Of what runs here, for the next exchange with the function; ``slow``: more may be about to be said."""

    progress: Progress | None = None
    facts: tuple[FactIn, ...] = ()
    slow: bool = False


class Membership:
    """``unsaid``: the end of a job that ended well, said once its output is in the bucket."""

    def __init__(self, me: Standing, parts: Parts) -> None:
        self._me = me
        self._parts = parts
        self._super = parts.supervisor
        self._reporter: report.Reporter | None = None
        self._heard = False  # what the launcher runs: it may be up before its first word is taken in
        self._said = -1  # the newest generation whose end this agent has told
        self.unsaid: Ending | None = None

    def news(self) -> News:
        child = self._super.child
        if child is not None and self._reporter is not None:
            now = time.monotonic()
            return News(
                self._reporter.progress(child.control, self._me.clock.now()),
                tuple(self._reporter.facts(child.control, now)),
                self._reporter.late(child.control, now),
            )
        return News(self._parts.output.beat()) if self.unsaid is not None else News()

    # ------------------------------------------------------------------ what the document wants

    def drive(self) -> None:
        """Begin or end what the newest document says, as far as it can be now."""
        doc, child = self._me.doc, self._super.child
        if doc is None:
            return
        if child is None:
            self._without_child(doc)
        elif doc.gen > child.gen or self._me.place(doc) is None:
            self._super.discard()  # its peers are gone or go; what it holds is on the disks
        elif doc.state is DocState.SAVE_STOP:
            self._me.become(State.SAVING)
            self._super.save_and_stop(self._me.real(doc.deadline))
        elif self._reporter is None:
            self._reporter = report.Reporter.of(doc, self._me.rank)

    def _wanted(self, doc: Generation) -> bool:
        return doc.state in (DocState.RUN, DocState.ROLL_CALL) and self._me.place(doc) is not None

    def _without_child(self, doc: Generation) -> None:
        place, saved = self._me.place(doc), self._me.saved
        if place is None or saved.started > saved.ended:
            return  # what an agent before this one started is not accounted for yet
        if self._wanted(doc) and saved.started < doc.gen:
            self._start(doc, *place)
        elif doc.state is DocState.SAVE_STOP and self._said < doc.gen:
            # It had not begun, or an agent before this one saw its end: either way nothing of it runs.
            self._me.say(Kind.RELEASED, self._step(None), gen=doc.gen)

    def _start(self, doc: Generation, index: int, member: Member) -> None:
        me, ready, output = self._me, self._parts.ready, self._parts.output
        run, assignment = me.saved.run, me.saved.assignment
        if run is None or assignment is None or ready.source is None or not (self._parts.launcher.up and self._heard):
            return
        if member.disk and self._parts.mounting.number is None:
            me.log.once("disk", "disk.awaited", gen=doc.gen)
            return
        me.log.over("disk", "disk.there")
        given = self._parts.given.environment(run.secrets)
        if given is None:
            if self._parts.given.refused:
                self._not_started(doc.gen, self._parts.given.refused)
                self._parts.given.again()
            return
        ckpt, saver = me.ckpt(assignment.job), me.settings.run / SAVER_SOCKET
        out = output.folder(assignment.job, disk=member.disk)
        node = Node(assignment.rank, index, member.address, ready.source, saver, ckpt, out, not member.disk, given)
        me.save(started=doc.gen)  # before: an agent that dies now finds a generation that did not end well
        try:
            self._super.start(doc, run, node)
        except (LaunchError, RenderError, OSError) as error:
            self._not_started(doc.gen, str(error))
            self._parts.launcher.quit()
            return
        self.tell_disk()
        self._reporter = report.Reporter.of(doc, assignment.rank)
        me.become(State.RUNNING)
        self._follow_log(doc.gen)
        give_back()

    def _not_started(self, gen: int, why: str) -> None:
        """A crash of the job's, as far as anybody can tell: its budget decides."""
        self._me.log("job.start.failed", gen=gen, error=why)
        self._follow_log(gen, f"spotkeeper: {why}")
        self.lost(gen, 1)

    def tell_disk(self) -> None:
        """A job that began without its disk writes there from the next save on."""
        if self._super.child is not None and self._parts.mounting.number is not None:
            self._super.child.control.disk = True

    # ------------------------------------------------------------------ the launcher

    def launcher_up(self, gen: int | None, code: int | None) -> None:
        """A fresh launcher has run nothing. One that an agent before this one used may hold our child."""
        self._heard = True
        saved = self._me.saved
        if self._super.child is not None or self.unsaid is not None:
            return
        if saved.started <= saved.ended:
            self._find_again(gen, code)
            return
        if gen == saved.started and saved.assignment is not None and saved.run is not None:
            self._adopt(saved.assignment.job, gen, saved.run)
            if code is not None:
                self.child_ended(gen, code, 0)
            return
        self._super.sweep()
        self.lost(saved.started)

    def _find_again(self, gen: int | None, code: int | None) -> None:
        """What was written down was lost, or is old (a full disk): a launcher that runs a generation knows better."""
        assignment, run = self._me.saved.assignment, self._me.saved.run
        if gen is None or code is not None or assignment is None or run is None:
            return
        self._me.log("job.found", gen=gen)
        self._me.save(started=gen)
        self._adopt(assignment.job, gen, run)

    def _adopt(self, job: str, gen: int, run: JobRun) -> None:
        self._super.adopt(job, gen, run)
        self._me.become(State.RUNNING)
        self._follow_log(gen)  # whoever did has died

    def launcher_lost(self, reason: str, text: str) -> None:
        self._me.log("launcher.lost", reason=reason)
        self._heard = False
        child = self._super.child
        self._parts.ready.launcher_lost(at_once=child is not None)
        self._super.sweep()
        if child is not None:
            self.child_ended(child.gen, KILLED, 0)
            return
        doc = self._me.doc
        if doc is not None and self._wanted(doc) and self._me.saved.started < doc.gen:
            # It cannot be started at all (no such Python, no torch): the job's crash budget decides.
            self._me.save(started=doc.gen)
            self._follow_log(doc.gen, f"{reason}\n{text}")
            self.lost(doc.gen, 1)

    # ------------------------------------------------------------------ the end of a generation

    def lost(self, gen: int, code: int = KILLED) -> None:
        """It ended without anybody here who saw how."""
        self._said = gen
        self._me.say(Kind.EXIT, str(code), gen=gen)
        self._me.save(ended=gen)

    def child_ended(self, gen: int, code: int, left: int) -> None:
        child, reporter, now = self._super.child, self._reporter, self._me.clock.now()
        if child is None or child.gen != gen:
            return
        if left:
            self._me.log("job.left", gen=gen, count=left)
        last = reporter.progress(child.control, now, last=True) if reporter else None
        life = report.Reporter(gen, True).progress(child.control, now, last=True)
        ending = self._super.ended(gen, code)
        if ending is None:
            return
        self._reporter, self.unsaid = None, ending
        job, rank = child.folder.parent.name, self._me.rank
        self._me.sync.want(self._me.ver, job, True, last)
        if not (ending.well and self._parts.output.begin(job, rank, gen, life or Progress(gen, 0, now))):
            self._ended(ending.code)

    def output_there(self, event: OutputThere) -> None:
        if self._parts.output.done(event):
            self._ended(0, "\n".join(f"not kept of SPOTKEEPER_OUTPUT: {line}" for line in event.left_out))

    def output_failed(self, error: str) -> None:
        if why_not := self._parts.output.failed(error):
            self._ended(FAILED, f"spotkeeper: {why_not}")

    def carry_output(self) -> None:
        """Until what the job left is in the bucket, unless a newer generation begins: that ends the job anew."""
        ending, doc, output = self.unsaid, self._me.doc, self._parts.output
        if ending is None:
            return
        if doc is not None and doc.gen > ending.gen:
            output.drop()
            if not output.busy:  # the next one writes to the same folder
                self.unsaid = changed(ending, discarded=True)
                self._ended(ending.code)
            return
        output.go_on()

    def _ended(self, code: int, words: str = "") -> None:
        """All that the end of the job asks for is done: it is said, and written down. ``words``: for its log."""
        ending, self.unsaid = self.unsaid, None
        if ending is None:
            return
        if words:
            self._follow_log(ending.gen, words)
        if not ending.discarded:
            self._say_ending(changed(ending, code=code))
        self._me.save(ended=ending.gen)
        self._me.become(State.STOPPED)
        self._parts.uploader.rest()
        if self._parts.launcher.stale:
            self._parts.launcher.renew()

    def _say_ending(self, ending: Ending) -> None:
        self._said = ending.gen
        if ending.commit is not None:
            self._parts.mounting.wrote(ending.commit, ending.gen)
        if ending.stopped:
            self._me.say(Kind.RELEASED, self._step(ending.commit), gen=ending.gen)
        else:
            self._tell_sick(ending)
            if ending.failure is not None and ending.code:
                self._me.say(Kind.FAILED, str(ending.failure), gen=ending.gen)
            self._me.say(Kind.EXIT, str(ending.code), gen=ending.gen)

    def _tell_sick(self, ending: Ending) -> None:
        """Before its end is said: whether the crash looks like broken hardware."""
        assignment = self._me.saved.assignment
        if ending.code in (0, NO_RESTART) or assignment is None:
            return
        found = sick.of_crash(self._super.folder(assignment.job, ending.gen), self._me.settings.root)
        if found is not None:
            self._me.log("host.suspect", gen=ending.gen, sign=found.value)
            self._me.say(Kind.SICK, found.value, gen=ending.gen)

    def _step(self, commit: Commit | None) -> str:
        commit = commit or self._parts.mounting.newest
        return "0" if commit is None else str(commit.step)

    def _follow_log(self, gen: int, extra: str = "") -> None:
        assignment = self._me.saved.assignment
        if assignment is not None:
            folder = self._super.folder(assignment.job, gen)
            who = whose(assignment.rank, self._me.settings.name)
            self._parts.uploader.follow(Task(object_name(assignment.job, assignment.rank, gen), folder, extra, who))

    def forget_job(self) -> None:
        """Another job, another attempt: nothing of the last one counts."""
        me, parts = self._me, self._parts
        if me.job is not None:
            parts.kept.left(me.job)
            shutil.rmtree(me.settings.run / me.job, ignore_errors=True)
            parts.output.drop()
            parts.output.forget(me.job)
            parts.mirror.forget_job()
        me.doc = None
        self._reporter = self.unsaid = None
        self._said = -1
        parts.ready.forget_job()
        parts.given.forget_job()
        parts.mounting.forget_job()
        me.save(started=-1, ended=-1, run=None)
