"""Starts and ends generations on this machine as the document says, and reports their ends.

The module compares the newest document with the running processes, so a restarted agent continues where its predecessor
stopped. When a generation ends, the fact about the end is first written to disk (``core/sync.py``), and then the state
file says that the end was reported. So an agent that is killed in between loses no fact: its successor reports the end.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from dataclasses import replace as changed
from pathlib import Path

from msgspec import structs

from spotkeeper.contract.facts import Kind
from spotkeeper.contract.generation import DocState, FactIn, Generation, JobRun, Member, Progress
from spotkeeper.train.agent_link.control import NO_RESTART, Commit
from spotkeeper.train.core import beneath
from spotkeeper_agent.agent.components import Components
from spotkeeper_agent.core.events import OutputThere
from spotkeeper_agent.core.state import AgentState, Assignment, MachineState
from spotkeeper_agent.host import memory
from spotkeeper_agent.host.usage import disk_bytes
from spotkeeper_agent.job import failures
from spotkeeper_agent.job import progress as report
from spotkeeper_agent.job.chunks import NodeRun, make_spool
from spotkeeper_agent.job.launch_spec import LaunchSpec, RenderError
from spotkeeper_agent.job.launcher_client import SAVER_SOCKET, LaunchError
from spotkeeper_agent.job.logs import Task, whose
from spotkeeper_agent.job.outputs import FAILED
from spotkeeper_agent.job.supervisor import Ending

KILLED = 137  # 128 + SIGKILL: the job's processes ended with their launcher


@dataclass(frozen=True)
class News:
    """Progress and facts for the next request. ``slow``: a step takes so long that the agent polls more often."""

    progress: Progress | None = None
    facts: tuple[FactIn, ...] = ()
    slow: bool = False


class Membership:
    """This machine's part in a job. ``unreported``: the end of a generation that is not reported yet, or None."""

    def __init__(self, machine: MachineState, components: Components) -> None:
        self._machine = machine
        self._components = components
        self._super = components.supervisor
        self._reporter: report.Reporter | None = None
        self._heard = False  # whether the launcher has reported what it runs
        self._reported = -1  # the newest generation whose end this agent has reported
        self.unreported: Ending | None = None

    def news(self) -> News:
        child = self._super.child
        if child is not None and self._reporter is not None:
            now = time.monotonic()
            progress = self._reporter.progress(child.control, self._machine.clock.now())
            if progress is not None and (disk := disk_bytes(self._machine.settings.mount)) is not None:
                progress = structs.replace(progress, disk_bytes=disk[1])
            return News(
                progress,
                tuple(self._reporter.facts(child.control, now)),
                self._reporter.late(child.control, now),
            )
        return News(self._components.output.beat()) if self.unreported is not None else News()

    # ------------------------------------------------------------------ what the document wants

    def drive(self) -> None:
        """Start or end generations as the newest document says."""
        doc, child = self._machine.doc, self._super.child
        if doc is None:
            return
        if child is None:
            self._without_child(doc)
        elif doc.gen > child.gen or self._machine.member_of(doc) is None:
            self._super.discard()  # the other members end as well, and the checkpoints are on the disks
        elif doc.state is DocState.SAVE_STOP:
            self._machine.become(AgentState.SAVING)
            self._super.save_and_stop(self._machine.real(doc.deadline))
        elif self._reporter is None:
            self._reporter = report.Reporter.of(doc, self._machine.node)

    def _wanted(self, doc: Generation) -> bool:
        return doc.state in (DocState.RUN, DocState.ROLL_CALL) and self._machine.member_of(doc) is not None

    def _without_child(self, doc: Generation) -> None:
        place, saved = self._machine.member_of(doc), self._machine.saved
        if place is None or saved.started > saved.ended:
            return  # the end of a generation that an earlier agent started is not reported yet
        if self._wanted(doc) and saved.started < doc.gen:
            self._start(doc, *place)
        elif doc.state is DocState.SAVE_STOP and self._reported < doc.gen:
            # The generation never started here, or an earlier agent saw its end: none of its processes runs.
            self._machine.say(Kind.RELEASED, self._step(None), gen=doc.gen)

    def _start(self, doc: Generation, index: int, member: Member) -> None:
        machine, ready, output = self._machine, self._components.preparation, self._components.output
        run, assignment = machine.saved.run, machine.saved.assignment
        if (
            run is None
            or assignment is None
            or ready.source is None
            or not (self._components.launcher.up and self._heard)
        ):
            return
        if (member.disk or run.scratch_gb) and self._components.mounting.number is None:
            machine.log.once("disk", "disk.awaited", gen=doc.gen)
            return
        machine.log.over("disk", "disk.there")
        secrets = self._components.secrets.environment(run.secrets)
        if secrets is None:
            if self._components.secrets.refused:
                self._not_started(doc.gen, self._components.secrets.refused)
                self._components.secrets.retry()
            return
        ckpt, saver = machine.ckpt(assignment.job), machine.settings.node / SAVER_SOCKET
        out = output.folder(assignment.job, disk=member.disk)
        spec = LaunchSpec(
            node=assignment.node,
            index=index,
            address=member.address,
            source=ready.source,
            saver=saver,
            ckpt=ckpt,
            output=out,
            late=not member.disk,
            fabric=machine.settings.fabric,
            extra_env=secrets,
            spool=self._spool(self._node_run(assignment, doc.gen)),
            scratch=machine.settings.scratch if run.scratch_gb else None,
            scratch_made=self._components.mounting.scratch_made,
        )
        machine.save(started=doc.gen)  # before the start, so that an agent restarted now reports it as lost
        try:
            self._super.start(doc, run, spec)
        except (LaunchError, RenderError, OSError) as error:
            self._not_started(doc.gen, str(error))
            self._components.launcher.quit()
            return
        self._components.mounting.scratch_made = False  # the job's log says it once
        self.tell_disk()
        self._reporter = report.Reporter.of(doc, assignment.node)
        machine.become(AgentState.RUNNING)
        self._follow_log(doc.gen)
        memory.trim()

    def _spool(self, run: NodeRun) -> Path | None:
        try:
            return make_spool(self._machine.settings.state / "logs", run)
        except OSError as error:  # the disk is full: only the ends of logs are kept
            self._machine.log("logs.spool", gen=run.gen, error=str(error))
            return None

    def _not_started(self, gen: int, why: str) -> None:
        """Report a start that failed as a crash, so that the job's crash budget ends repeated tries."""
        self._machine.log("job.start.failed", gen=gen, error=why)
        self._follow_log(gen, f"spotkeeper: {why}")
        self.lost(gen, 1)

    def tell_disk(self) -> None:
        """Tell the job that its disk is mounted; the job's next saves go there."""
        if self._super.child is not None and self._components.mounting.number is not None:
            self._super.child.control.disk_ready = True

    # ------------------------------------------------------------------ the launcher

    def launcher_up(self, gen: int | None, code: int | None) -> None:
        """Handle a launcher that answers. It may still run a generation that an earlier agent started."""
        self._heard = True
        saved = self._machine.saved
        if self._super.child is not None or self.unreported is not None:
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
        self._follow_log(saved.started)
        self.lost(saved.started)

    def _find_again(self, gen: int | None, code: int | None) -> None:
        """Adopt a generation that the launcher runs but the state file lacks, because the disk was full then."""
        assignment, run = self._machine.saved.assignment, self._machine.saved.run
        if gen is None or code is not None or assignment is None or run is None:
            return
        self._machine.log("job.found", gen=gen)
        self._machine.save(started=gen)
        self._adopt(assignment.job, gen, run)

    def _adopt(self, job: str, gen: int, run: JobRun) -> None:
        self._super.adopt(job, gen, run)
        self._machine.become(AgentState.RUNNING)
        self._follow_log(gen)  # its previous follower, the earlier agent, has ended

    def launcher_lost(self, reason: str, text: str) -> None:
        self._machine.log("launcher.lost", reason=reason)
        self._heard = False
        child = self._super.child
        self._components.preparation.launcher_lost(at_once=child is not None)
        self._super.sweep()
        if child is not None:
            self.child_ended(child.gen, KILLED, 0)
            return
        doc = self._machine.doc
        if doc is not None and self._wanted(doc) and self._machine.saved.started < doc.gen:
            # It cannot start at all (no such Python, no torch): a crash, which the job's crash budget covers.
            self._machine.save(started=doc.gen)
            self._follow_log(doc.gen, f"{reason}\n{text}")
            self.lost(doc.gen, 1)

    # ------------------------------------------------------------------ the end of a generation

    def lost(self, gen: int, code: int = KILLED) -> None:
        """Report the end of a generation that this agent has not seen running; ``code``: the exit code to report."""
        self._reported = gen
        self._machine.say(Kind.EXIT, str(code), gen=gen)
        self._machine.save(ended=gen)

    def child_ended(self, gen: int, code: int, left: int) -> None:
        child, reporter, now = self._super.child, self._reporter, self._machine.clock.now()
        if child is None or child.gen != gen:
            return
        if left:
            self._machine.log("job.left", gen=gen, count=left)
        last = reporter.progress(child.control, now, last=True) if reporter else None
        if reporter is not None and reporter.lowest:
            self._components.metrics.ended(child)
            self.upload_metrics()
        life = report.Reporter(gen, True).progress(child.control, now, last=True)
        ending = self._super.ended(gen, code)
        if ending is None:
            return
        self._reporter, self.unreported = None, ending
        job, node = child.folder.parent.name, self._machine.node
        self._machine.sync.want(self._machine.ver, job, True, last)
        if not (ending.well and self._components.output.begin(job, node, gen, life or Progress(gen, 0, now))):
            self._ended(ending.code)

    def output_there(self, event: OutputThere) -> None:
        if self._components.output.done(event):
            self._ended(0, "\n".join(f"not uploaded from SPOTKEEPER_OUTPUT: {line}" for line in event.left_out))

    def output_failed(self, error: str) -> None:
        if why_not := self._components.output.failed(error):
            self._ended(FAILED, f"spotkeeper: {why_not}")

    def upload_output(self) -> None:
        """Continue the upload of the job's output; if a newer generation exists, drop this upload."""
        ending, doc, output = self.unreported, self._machine.doc, self._components.output
        if ending is None:
            return
        if doc is not None and doc.gen > ending.gen:
            output.drop()
            if not output.busy:  # the next generation writes to the same folder
                self.unreported = changed(ending, discarded=True)
                self._ended(ending.code)
            return
        output.go_on()

    def upload_metrics(self) -> None:
        """Upload the metrics of the generation that runs here, or has ended, if this node is the lowest member."""
        lowest = self._reporter is not None and self._reporter.lowest
        self._components.metrics.advance(self._super.child if lowest else None)

    def _ended(self, code: int, words: str = "") -> None:
        """Store a generation's end and report it, unless it was discarded. Called after the output's upload.

        ``words``: text to add to the generation's log.
        """
        ending, self.unreported = self.unreported, None
        if ending is None:
            return
        if words:
            self._follow_log(ending.gen, words)
        if not ending.discarded:
            self._report_ending(changed(ending, code=code))
        self._machine.save(ended=ending.gen)
        self._machine.become(AgentState.STOPPED)
        self._components.uploader.rest()
        if self._components.launcher.stale:
            self._components.launcher.renew()

    def _report_ending(self, ending: Ending) -> None:
        self._reported = ending.gen
        if ending.commit is not None:
            self._components.mounting.wrote(ending.commit, ending.gen)
        run, rung = self._machine.saved.run, ending.rung
        if run is not None and run.metric and rung is not None:
            self._machine.say(Kind.RUNG, str(rung), gen=ending.gen)
        if ending.stopped:
            self._machine.say(Kind.RELEASED, self._step(ending.commit), gen=ending.gen)
        else:
            self._report_hardware_fault(ending)
            if ending.unlooped and ending.well:
                self._machine.say(Kind.UNLOOPED, "0", gen=ending.gen)
            if ending.failure is not None and ending.code:
                self._machine.say(Kind.FAILED, str(ending.failure), gen=ending.gen)
            self._machine.say(Kind.EXIT, str(ending.code), gen=ending.gen)

    def _report_hardware_fault(self, ending: Ending) -> None:
        """Report signs of broken hardware after a crash, before the generation's end is reported."""
        assignment = self._machine.saved.assignment
        if ending.code in (0, NO_RESTART) or assignment is None:
            return
        found = failures.of_crash(self._super.folder(assignment.job, ending.gen), self._machine.settings.root)
        if found is not None:
            self._machine.log("host.suspect", gen=ending.gen, sign=found.value)
            self._machine.say(Kind.HARDWARE_FAULT, found.value, gen=ending.gen)

    def _step(self, commit: Commit | None) -> str:
        commit = commit or self._components.mounting.newest
        return "0" if commit is None else str(commit.step)

    def _follow_log(self, gen: int, extra: str = "") -> None:
        assignment = self._machine.saved.assignment
        if assignment is not None:
            folder = self._super.folder(assignment.job, gen)
            who = whose(assignment.node, self._machine.settings.name)
            self._components.uploader.follow(Task(self._node_run(assignment, gen), folder, extra, who))

    def _node_run(self, assignment: Assignment, gen: int) -> NodeRun:
        run = self._machine.saved.run
        return NodeRun(assignment.job, assignment.node, gen, run.log_bytes if run is not None else None)

    def forget_job(self) -> None:
        """Forget the previous job or attempt before this machine serves another one."""
        machine, parts = self._machine, self._components
        if machine.job is not None:
            parts.old_jobs.left(machine.job)
            beneath.remove(machine.settings.run, machine.job)
            parts.output.drop()
            parts.output.forget(machine.job)
            parts.metrics.forget_job()
            parts.mirror.forget_job()
        machine.doc = None
        self._reporter = self.unreported = None
        self._reported = -1
        parts.preparation.forget_job()
        parts.secrets.forget_job()
        parts.mounting.forget_job()
        machine.save(started=-1, ended=-1, run=None)
