"""What the function says of this machine: its role, its job, the newest document; and what its silence means.

Words are taken in here, and acted on elsewhere (``membership.py``, ``leaving.py``), so that whatever order they come
in, the newest one counts.
"""

from __future__ import annotations

from spotkeeper.spec.facts import Kind
from spotkeeper.spec.generation import DocState, Generation, Role, SyncReply
from spotkeeper.vm.lease import BootWatch, Lease
from spotkeeper.vm.leaving import Farewell, Leaving, Then
from spotkeeper.vm.membership import Membership
from spotkeeper.vm.parts import Parts
from spotkeeper.vm.saved import Assignment
from spotkeeper.vm.standing import Standing, State
from spotkeeper.vm.sync import POLL_S


class Orders:
    """For the loop's thread."""

    def __init__(self, me: Standing, parts: Parts, membership: Membership, farewell: Farewell) -> None:
        self._me = me
        self._parts = parts
        self._membership = membership
        self._farewell = farewell
        self._lease = Lease(me.clock.steady())
        self._boot_watch = BootWatch(me.clock.steady(), me.clock.scale, me.settings.run / "known")
        self._repeat_at = 0.0  # steady

    def answered(self, reply: SyncReply, asked: tuple[str, ...]) -> None:
        """``asked``: the jobs of which the question was whether they are over."""
        self._lease.renew(self._me.clock.steady(), reply.lease_minutes)
        if reply.role is not Role.UNKNOWN:
            self._boot_watch.disarm()
        if self._farewell.leaving is None:
            self._obey(reply)
        self._drop_ended(asked, reply.ended)

    def _obey(self, reply: SyncReply) -> None:
        static = self._me.settings.static
        match reply.role:
            case Role.UNKNOWN:
                if static:
                    self._me.say(Kind.HELLO, gen=0, again=True)
            case Role.SUPERSEDED:
                then = Then.IDLE if static else Then.POWER_OFF
                self._farewell.begin(Leaving("superseded", then, attempt=reply.attempt, over=reply.over))
            case Role.IDLE:
                if self._me.saved.assignment is None:
                    self._me.become(State.IDLE)
                else:
                    self._farewell.begin(Leaving("its job is over", Then.IDLE))
            case Role.STANDBY | Role.MEMBER:
                self._assigned(reply)

    def _drop_ended(self, asked: tuple[str, ...], ended: tuple[str, ...]) -> None:
        """Jobs that ended while their checkpoints lay here and this node served another, or none."""
        over = self._parts.kept.over(asked, ended, self._me.job)
        if over and self._me.settings.static and self._farewell.leaving is None:
            self._parts.mounting.drop(over)

    def _assigned(self, reply: SyncReply) -> None:
        me = self._me
        if reply.job is None or reply.rank is None or reply.attempt is None:
            me.log.once("role", "sync.odd", role=reply.role.value, detail="a role without job, rank and attempt")
            return
        assignment = Assignment(reply.job, reply.rank, reply.attempt, reply.disk)
        if not assignment.same_life(me.saved.assignment):
            me.log("assigned", job=reply.job, rank=reply.rank, attempt=reply.attempt)
            self._membership.forget_job()
            me.sync.assigned(reply.job)
            me.save(assignment=assignment)
            self._parts.ready.greet_when_warm()
        me.save(assignment=assignment, run=reply.run or me.saved.run)
        if reply.role is Role.STANDBY:
            self._repeat()
        if me.state in (State.BOOT, State.HELLO, State.IDLE):
            me.become(State.STANDBY if self._parts.supervisor.child is None else State.RUNNING)
        self._parts.mirror.told(reply)
        if reply.doc is not None and (me.doc is None or reply.doc.ver > me.doc.ver):
            self._take(reply.doc)

    def _repeat(self) -> None:
        """Until a machine is admitted the function takes only its hello: say again what is still so."""
        now = self._me.clock.steady()
        if now < self._repeat_at:
            return
        self._repeat_at = now + POLL_S
        if self._me.saved.notice is not None:
            self._me.say(Kind.NOTICE, str(self._me.saved.notice.deadline), again=True)
        self._parts.mounting.tell(again=True)

    def _take(self, doc: Generation) -> None:
        self._me.log("doc", ver=doc.ver, gen=doc.gen, state=doc.state.value, members=len(doc.members))
        self._me.doc = doc
        if doc.state is DocState.ROLL_CALL:
            self._me.say(Kind.HERE, str(doc.ver))
        if doc.state is DocState.DONE:
            then = Then.IDLE if self._me.settings.static else Then.POWER_OFF
            self._farewell.begin(Leaving("the job is done", then))

    def heed_silence(self) -> None:
        """The money fuses: nobody has taken this machine in, or nobody has answered for too long."""
        me, now = self._me, self._me.clock.steady()
        if self._boot_watch.over(now) and not me.settings.static and me.saved.assignment is None:
            self._farewell.begin(Leaving("nobody has taken it in since its boot", Then.POWER_OFF))
            return
        if not self._lease.over(now):
            me.log.over("lease", "lease.well")
            return
        me.log.once("lease", "lease.over", minutes=self._lease.minutes)
        if me.settings.static:
            self._parts.supervisor.save_and_stop(None)  # it costs no more than it did; it keeps asking
        else:
            self._farewell.begin(Leaving("no word from the function", Then.POWER_OFF, save=True))
