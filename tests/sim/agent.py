"""What the agent on one boot of a machine does, as the function sees it (``spotkeeper_agent`` is the real one).

It asks every 5 s, and more often while it waits, as the real one does (``pending_s``); in between nothing can
change for it, so it is woken at its next turn when the record changed, when a round falls due, or when it has
something to say. Requests may be lost; what was said is said again until answered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotkeeper.contract.cloud import VmStatus
from spotkeeper.contract.facts import Kind
from spotkeeper.contract.generation import DocState, FactIn, Generation, Member, Role, Sync, SyncReply
from spotkeeper.reconcile.controller.document import Speaker
from spotkeeper_agent.core.sync import POLL_S, answer_s, pending_s
from tests.sim.gang import SAVE_S, Gang
from tests.sim.meter import POLL, polls_in

if TYPE_CHECKING:
    from tests.sim.cloud import Drive, Machine
    from tests.sim.engine import Timer
    from tests.sim.world import World

RETRY_S = (1.0, 5.0)
MOUNT_S = 1.0
LAUNCH_S = 0.6
RESERVE_S = 8.0  # of a notice: to agree, hash, report


class Agent:
    """One boot of one machine."""

    def __init__(self, world: World, machine: Machine) -> None:
        self.world, self.machine, self.boot = world, machine, machine.boot
        self.uid, self.name = machine.uid, machine.vm.name
        self.who = Speaker(machine.uid, machine.vm.name, machine.vm.zone)
        self.job = world.jobs[machine.vm.job]
        self.role = Role.UNKNOWN
        self.node = -1
        self.disk: int | None = None
        self.doc: Generation | None = None
        self.started = 0  # the newest generation it has run
        self.gang: Gang | None = None  # what it runs now
        self.mounted: Drive | None = None
        self.notice: float | None = None
        self.alive = True  # the agent itself
        self.hung = False
        self.leaving = False
        self.outbox: list[FactIn] = []
        self.told: set[tuple[Kind, int, str]] = set()
        self.phase = world.random.random()
        self.since = world.engine.t  # when it began to wait: with its birth, its gang's end, or a new stage
        self._settled: float | None = world.engine.t  # its idle polls are counted until then; None: it does not wait
        self._timer: Timer | None = None
        self.trying: float | None = None  # since when nobody has answered it
        self.again = False  # what it said last had no answer
        self._asked: float | None = None  # since when it waits for an answer
        self._until = 0.0  # then it gives that request up
        self._launching = 0
        self.job.agents.append(self)
        if machine.notice is not None:
            self.notice = machine.notice
        self.say(Kind.HELLO)

    # -- talking

    @property
    def waits(self) -> bool:
        doc = self.doc
        training = self.gang is not None and self.role is Role.MEMBER and self.notice is None
        return not (training and doc is not None and doc.state is DocState.RUN)

    def settle(self) -> None:
        """Count the polls that found nothing new; they are not simulated, but paid.

        Called after every change of what it waits for, and when somebody reads the meter.
        """
        now = self.world.engine.t
        if self._settled is not None:
            idle = polls_in(now - self.since) - polls_in(self._settled - self.since)
            self.world.function.counts[POLL] += idle
        waits = self.alive and not self.hung and self.waits
        if waits and self._settled is None:
            self.since = now
        self._settled = now if waits else None

    def say(self, kind: Kind, gen: int = 0, value: str = "0") -> None:
        if (kind, gen, value) not in self.told:
            self.told.add((kind, gen, value))
            self.outbox.append(FactIn(kind, gen, value))
            self.turn(self.world.engine.t + 0.05 + 0.2 * self.phase)

    def wake(self) -> None:
        """Something may be new: at its next turn."""
        now = self.world.engine.t
        period = pending_s(now - self.since) if self.waits else POLL_S
        turns = int(now / period - self.phase) + 1
        self.turn(max(now, (turns + self.phase) * period))

    def turn(self, when: float) -> None:
        if not self.alive or self.hung:
            return
        if self._timer is not None and self._timer.what is not None:
            if self._timer.when <= when:
                return
            self._timer.off()
        self._timer = self.world.engine.at(when, self._sync)

    def _sync(self) -> None:
        if not self.alive or self.hung:
            return
        now = self.world.engine.t
        if self._asked is not None and now < self._until:
            self.turn(self._until)
            return
        said = tuple(self.outbox)
        job = self.job.id if self.node >= 0 else None
        body = Sync(self.boot, self.doc.ver if self.doc else 0, job, said, None, self.waits, again=self.again)
        self._asked, self._until = now, now + answer_s(body)
        self.trying = self.trying or now
        self.turn(self._until)
        guard = self._timer
        self.again = self.again or bool(said) or self.waits
        self.settle()
        self.world.function.counts[POLL] -= self._settled is not None  # it is one of those: this one is simulated
        answer = self.world.function.sync(self.who, body)
        if not self.alive or self.hung or self._asked != now:
            return  # an answer that comes when nobody waits for it any more
        self._asked = None
        if guard is not None and guard is self._timer:
            guard.off()
        if answer is None:
            self.turn(self.world.engine.t + self.world.random.uniform(*RETRY_S))
            return
        self.again = False
        if answer.role is Role.UNKNOWN:  # nobody took it in: it says so again
            self.turn(self.world.engine.t + POLL_S)
            return
        self.trying = None
        self.outbox = [fact for fact in self.outbox if fact not in said]
        self._obey(answer)

    def _obey(self, answer: SyncReply) -> None:
        self.role = answer.role
        if self.leaving:
            self._leave()
            return
        if answer.role is Role.SUPERSEDED or (answer.doc is not None and answer.doc.state is DocState.DONE):
            self.leaving = True
            self._leave()
            return
        assert answer.node is not None
        self.node, self.disk = answer.node, answer.disk
        self.machine.admitted = self.machine.admitted or self.world.admitted(self.job.id, self.uid)
        if answer.role is Role.STANDBY and self.machine.admitted:
            self._repeat()
        if answer.doc is not None and (self.doc is None or answer.doc.ver > self.doc.ver):
            self.settle()
            if self.doc is None or (self.doc.gen, self.doc.state) != (answer.doc.gen, answer.doc.state):
                self.since = self.world.engine.t
            self._take(answer.doc)
            self.settle()
        if self._misses_news():
            self.wake()
        self.disk_there()
        self._drive()

    def _misses_news(self) -> bool:
        """Whether this answer came of what was read moments ago, so that the next poll finds more."""
        due = self.world.store.read_due(self.job.id) if self.waits else None
        newer = self.world.record(self.job.id).ver > (self.doc.ver if self.doc is not None else 0)
        return newer or (due is not None and due <= self.world.engine.t)

    def _repeat(self) -> None:
        """What was said before the admission was not taken in: again, once."""
        if self.notice is not None:
            self.say(Kind.NOTICE, 0, f"{self.notice:.0f}")
        if self.mounted is not None:
            self._tell_disk(self.mounted)

    def _take(self, doc: Generation) -> None:
        self.doc = doc
        if doc.state is DocState.ROLL_CALL and self._me(doc) is not None:
            self.say(Kind.HERE, doc.gen, str(doc.ver))

    def _me(self, doc: Generation) -> Member | None:
        return next((m for m in doc.members if m.uid == self.uid and m.boot == self.boot), None)

    # -- doing

    def _drive(self) -> None:
        doc = self.doc
        if doc is None or self.leaving:
            return
        me = self._me(doc)
        if self.gang is not None:
            if doc.gen > self.gang.gen or me is None:
                self._discard()
            elif doc.state is DocState.SAVE_STOP:
                self._stop(doc)
                return
        if me is None or self.gang is not None:
            return
        if doc.state in (DocState.RUN, DocState.ROLL_CALL):
            if self.started < doc.gen and not (me.disk and self.mounted is None):
                self._start(doc)
        elif doc.state is DocState.SAVE_STOP:
            self._tell_commit(doc.gen)
            self.say(Kind.RELEASED, doc.gen, "0")

    def _start(self, doc: Generation) -> None:
        self.started = self._launching = doc.gen
        gang = self.world.gang(self.job, doc)

        def up() -> None:
            if self.alive and not self.leaving and self._launching == doc.gen:
                self._launching = 0
                self.gang = gang
                self.settle()
                gang.join(self)
                if gang.over:
                    self.ended(Kind.EXIT, 1)
                else:
                    self._drive()

        self.world.checks.member(self, doc)
        self.world.engine.after(LAUNCH_S, up)

    def _stop(self, doc: Generation) -> None:
        gang = self.gang
        assert gang is not None
        if gang.began is not None:
            gang.save_and_stop(doc.deadline)
        elif not gang.stopping:  # it has not come together: nothing to save
            self._discard()
            self.say(Kind.RELEASED, doc.gen, "0")

    def _discard(self) -> None:
        gang, self.gang = self.gang, None
        self.settle()
        if gang is not None:
            gang.leave(self)

    def ended(self, kind: Kind, code: int = 0) -> None:
        """Its processes are gone."""
        gang, self.gang = self.gang, None
        self.settle()
        if not self.alive or self.hung or gang is None:
            return
        if kind is Kind.RELEASED:
            self._tell_commit(gang.gen)
            self.say(Kind.RELEASED, gang.gen, str(gang.commit[1] if gang.commit else 0))
        elif self.doc is not None and self.doc.state is DocState.SAVE_STOP and code:
            self.say(Kind.RELEASED, gang.gen, "0")
        else:
            self._tell_commit(gang.gen)
            self.say(Kind.EXIT, gang.gen, str(code))
        if self.leaving:
            self._leave()

    def stalls(self) -> None:
        """A step takes far too long."""
        if self.alive and not self.hung and self.gang is not None:
            self.say(Kind.STALL, self.gang.gen, "1")

    # -- disk

    def disk_there(self) -> None:
        """Attached to this machine, and its to mount."""
        if self.mounted is not None or self.leaving or self.disk is None:
            return
        for drive in self.world.cloud.drives.values():
            if drive.user == self.uid and drive.disk.number == self.disk:
                self.world.engine.after(MOUNT_S, lambda d=drive: self._mount(d))
                return

    def _mount(self, drive: Drive) -> None:
        if not self.alive or self.hung or self.mounted is not None or self.leaving or drive.user != self.uid:
            return
        if self.gang is not None:
            self.gang.settle()
        self.mounted = drive
        self._tell_disk(drive)
        self._drive()

    def _tell_disk(self, drive: Drive) -> None:
        self.say(Kind.ATTACHED, 0, str(drive.disk.number))
        if drive.newest is not None:
            self.say(Kind.CHECKPOINT, 0, "{}-{}".format(*drive.newest))

    def _tell_commit(self, gen: int) -> None:
        if self.mounted is not None and self.mounted.newest is not None:
            self.say(Kind.CHECKPOINT, gen, "{}-{}".format(*self.mounted.newest))

    # -- notices and the end

    def noticed(self, deadline: float) -> None:
        self.notice = deadline
        self.settle()
        if not self.alive or self.hung:
            return
        self.say(Kind.NOTICE, 0, f"{deadline:.0f}")
        self.wake()
        left = deadline - self.world.engine.t
        if self.gang is not None and left > 2 * SAVE_S + RESERVE_S:
            self.gang.save()
        self.world.engine.at(deadline - SAVE_S - min(RESERVE_S, left / 4), lambda: self._last_save(deadline))

    def _last_save(self, deadline: float) -> None:
        if self.alive and not self.hung and self.notice == deadline and self.gang is not None:
            self.gang.save_and_stop(deadline)

    def reprieved(self, deadline: float) -> None:
        self.notice = None
        self.settle()
        self.say(Kind.REPRIEVE, 0, f"{deadline:.0f}")

    def going_down(self, deadline: float) -> None:
        """ACPI: the system ends in 30 s, of which the job has 25."""
        if not self.alive or self.hung or self.leaving:
            return
        if self.gang is not None:
            self.gang.save_and_stop(deadline - 5.0)

    def _leave(self) -> None:
        """End what runs, unmount, say freed, power off."""
        self._launching = 0
        if self.gang is not None:
            if self.gang.stopping:
                return  # the save is under way: ended() comes here again
            self._discard()
        if self.mounted is not None:
            number, self.mounted = self.mounted.disk.number, None
            self.say(Kind.FREED, 0, str(number))
            return
        if self.outbox:
            self.wake()
            return
        if self.machine.vm.status is VmStatus.RUNNING:
            self.world.cloud.stopping(self.machine, 3.0)

    def hang(self) -> None:
        """The machine stands still; its peers wait for it."""
        self.hung = True
        self.settle()
        if self.gang is not None:
            gang, self.gang = self.gang, None
            gang.lost(self, hangs=True)

    def die(self) -> None:
        """The machine is gone, or this boot of it is."""
        self.alive = False
        self.settle()
        if self._timer is not None:
            self._timer.off()
        gang, self.gang = self.gang, None
        if gang is not None:
            gang.lost(self, hangs=self.world.random.random() < self.world.hang_share)
        if self in self.job.agents:
            self.job.agents.remove(self)
