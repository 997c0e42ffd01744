"""Processes the function's replies: this machine's role, its job, the newest document.

Replies are only recorded here; ``membership.py`` and ``teardown.py`` act on them. The document with the highest version
counts, in whatever order replies arrive. If replies stop for longer than :class:`Lease` allows, the job is saved and
stopped, and a machine that is not static powers itself off. A shorter outage of the function stops no training. If no
job is assigned within the time of :class:`BootWatch`, a machine that is not static powers itself off too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spotkeeper.contract.facts import Kind
from spotkeeper.contract.generation import DocState, Generation, Role, SyncReply
from spotkeeper_agent.agent.components import Components
from spotkeeper_agent.agent.membership import Membership
from spotkeeper_agent.agent.teardown import Departure, Teardown, Then
from spotkeeper_agent.core.state import AgentState, Assignment, MachineState
from spotkeeper_agent.core.sync import POLL_S


@dataclass
class Lease:
    """The time that this machine may train without a reply.

    When the lease ends, the job is saved and stopped, and the machine is powered off unless it is static. ``heard``:
    when the last reply came or, before the first reply, when the agent started. It is in virtual seconds of a steady
    clock, so that setting the wall clock does not end a lease.
    """

    heard: float
    minutes: int = 120

    def renew(self, now: float, minutes: int) -> None:
        self.heard = now
        self.minutes = minutes

    def over(self, now: float) -> bool:
        return now - self.heard >= self.minutes * 60


BOOT_S = 900.0  # virtual; the function waits 8 minutes for a boot and then requests another machine
WORK_S = 60.0  # real seconds of work in a boot, added for clocks that run faster


@dataclass
class BootWatch:
    """Limits how long a machine that is not static waits for its first role, since waiting costs money.

    If the agent never starts, a timer in the startup script powers the machine off. The agent stops that timer by
    making the file ``mark``. The file lies in ``/run``, which is empty after a boot, so the limit holds in every boot.
    """

    started: float  # steady virtual seconds
    scale: float
    mark: Path
    known: bool = False

    def disarm(self) -> None:
        if not self.known:
            self.known = True
            self.mark.touch()

    def over(self, now: float) -> bool:
        return not self.known and now - self.started >= BOOT_S + WORK_S * max(0.0, self.scale - 1.0)


class ReplyHandler:
    """Records the function's replies. Only the loop's thread may call it."""

    def __init__(
        self, machine: MachineState, components: Components, membership: Membership, teardown: Teardown
    ) -> None:
        self._machine = machine
        self._components = components
        self._membership = membership
        self._teardown = teardown
        self._lease = Lease(machine.clock.steady())
        self._boot_watch = BootWatch(machine.clock.steady(), machine.clock.scale, machine.settings.run / "known")
        self._repeat_at = 0.0  # steady

    def answered(self, reply: SyncReply, asked: tuple[str, ...]) -> None:
        """Process a reply. ``asked``: the old jobs that the request listed (``Sync.old_jobs``)."""
        self._lease.renew(self._machine.clock.steady(), reply.lease_minutes)
        if reply.role is not Role.UNKNOWN:
            self._boot_watch.disarm()
        if self._teardown.departure is None:
            self._take_role(reply)
        self._drop_ended(asked, reply.ended)

    def _take_role(self, reply: SyncReply) -> None:
        static = self._machine.settings.static
        match reply.role:
            case Role.UNKNOWN:
                if static:
                    self._machine.say(Kind.HELLO, gen=0, again=True)
            case Role.SUPERSEDED:
                then = Then.IDLE if static else Then.POWER_OFF
                self._teardown.begin(
                    Departure("superseded", then, attempt=reply.attempt, over=reply.over, moves=reply.moves)
                )
            case Role.IDLE:
                if self._machine.saved.assignment is None:
                    self._machine.become(AgentState.IDLE)
                else:
                    self._teardown.begin(Departure("its job is over", Then.IDLE))
            case Role.STANDBY | Role.MEMBER:
                self._assigned(reply)

    def _drop_ended(self, asked: tuple[str, ...], ended: tuple[str, ...]) -> None:
        """Delete folders of jobs that ended while this static machine served another job or no job."""
        over = self._components.old_jobs.over(asked, ended, self._machine.job)
        if over and self._machine.settings.static and self._teardown.departure is None:
            self._components.mounting.drop(over)

    def _assigned(self, reply: SyncReply) -> None:
        machine = self._machine
        if reply.job is None or reply.node is None or reply.attempt is None:
            machine.log.once("role", "sync.odd", role=reply.role.value, detail="the reply has no job, node or attempt")
            return
        assignment = Assignment(reply.job, reply.node, reply.attempt, reply.disk)
        if not assignment.same_life(machine.saved.assignment):
            machine.log("assigned", job=reply.job, node=reply.node, attempt=reply.attempt)
            self._membership.forget_job()
            machine.sync.assigned(reply.job)
            machine.save(assignment=assignment)
            self._components.preparation.greet_when_warm()
        machine.save(assignment=assignment, run=reply.run or machine.saved.run)
        if reply.role is Role.STANDBY:
            self._repeat()
        if machine.state in (AgentState.BOOT, AgentState.HELLO, AgentState.IDLE):
            machine.become(AgentState.STANDBY if self._components.supervisor.child is None else AgentState.RUNNING)
        self._components.mirror.told(reply)
        if reply.doc is not None and (machine.doc is None or reply.doc.ver > machine.doc.ver):
            self._take_document(reply.doc)

    def _repeat(self) -> None:
        """Report notice and disk again, once per poll: the function ignores both until it has admitted this machine."""
        now = self._machine.clock.steady()
        if now < self._repeat_at:
            return
        self._repeat_at = now + POLL_S
        if self._machine.saved.notice is not None:
            self._machine.say(Kind.NOTICE, str(self._machine.saved.notice.deadline), again=True)
        self._components.mounting.tell(again=True)

    def _take_document(self, doc: Generation) -> None:
        self._machine.log("doc", ver=doc.ver, gen=doc.gen, state=doc.state.value, members=len(doc.members))
        self._machine.doc = doc
        if doc.state is DocState.ROLL_CALL:
            self._machine.say(Kind.HERE, str(doc.ver))
        if doc.state is DocState.DONE:
            then = Then.IDLE if self._machine.settings.static else Then.POWER_OFF
            self._teardown.begin(Departure("the job is done", then))

    def check_silence(self) -> None:
        """End this machine's work if its first role (:class:`BootWatch`) or a reply (:class:`Lease`) is overdue."""
        machine, now = self._machine, self._machine.clock.steady()
        if self._boot_watch.over(now) and not machine.settings.static and machine.saved.assignment is None:
            self._teardown.begin(Departure("no job was assigned since the boot", Then.POWER_OFF))
            return
        if not self._lease.over(now):
            machine.log.over("lease", "lease.well")
            return
        machine.log.once("lease", "lease.over", minutes=self._lease.minutes)
        if machine.settings.static:
            self._components.supervisor.save_and_stop(None)  # a static machine costs the same either way, and polls on
        else:
            self._teardown.begin(Departure("no reply from the function", Then.POWER_OFF, save=True))
