"""What an agent on one boot of one machine does, as the function and the control plane see it.

A guest talks to nothing but its own machine (its devices, its notice) and the function, whose answer may come
late, twice or never. Its clock may be minutes off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotkeeper.contract import names
from spotkeeper.contract.facts import Kind
from spotkeeper.contract.generation import DocState, FactIn, Generation, Progress, Role, Sync, SyncReply
from spotkeeper.reconcile.controller.document import Speaker

if TYPE_CHECKING:
    from spotkeeper.local.core.vm import LocalVm
    from tests.properties.world import World

POLL_S = 5.0
FAST_S = 1.0
TIMEOUT_S = 30.0
SHUTDOWN_S = 5.0
SAVE_S = 2.0


class Guest:
    """One boot. ``skew``: how far its clock is off, seconds."""

    def __init__(self, world: World, vm: LocalVm, boot: str, up_at: float, skew: float) -> None:
        self.world, self.vm_id, self.boot, self.up_at, self.skew = world, vm.id, boot, up_at, skew
        self.who = Speaker(str(vm.id), vm.name, vm.zone)
        self.role = Role.UNKNOWN
        self.job: str | None = None
        self.node = self.attempt = -1
        self.ver = self.gen = self.step_no = 0
        self.doc: Generation | None = None
        self.launched: Generation | None = None
        self.alive = False  # processes of `gen` run
        self.hung = False
        self.mounted: str | None = None  # the disk's name
        self.disk: int | None = None  # the number it was told to mount
        self.outbox: list[FactIn] = [FactIn(Kind.HELLO)]
        self.said: set[tuple[Kind, int, str]] = set()
        self.asked_at = 0.0
        self.asking: int | None = None  # the request that is under way
        self.requests = 0
        self.saved_at: float | None = None
        self.off_at: float | None = None
        self.notice: int | None = None
        self.leaving = False
        self.heard, self.lease_s = up_at, 7200.0

    # -- life

    def step(self) -> None:
        """One second of it."""
        now = self.world.now
        if self.off_at is not None and now >= self.off_at:
            self.world.power_off(self)
            return
        if now < self.up_at or self.hung:
            return
        vm = self.world.plane.vm(self.vm_id)
        if vm is None:
            return
        if now - self.heard >= self.lease_s:  # the lease: saved, and paid no longer
            self.world.commit(self)
            self.world.power_off(self)
            return
        self._heed(vm)
        self._mount(vm)
        self._train()
        self._stop()
        self._ask()

    def button(self) -> None:
        """The machine goes down: the job ends, and so does the system, seconds later. One that hangs does not hear."""
        if self.hung:
            return
        self.off_at = self.world.now + SHUTDOWN_S
        self._tell_notice(int(self.world.now + self.skew + SHUTDOWN_S))

    def say(self, kind: Kind, gen: int = 0, value: str = "0") -> None:
        if (kind, gen, value) not in self.said:
            self.said.add((kind, gen, value))
            self.outbox.append(FactIn(kind, gen, value))

    def _heed(self, vm: LocalVm) -> None:
        if vm.preempted and vm.notice_until is not None and self.notice is None:
            self._tell_notice(int(vm.notice_until + self.skew))
        elif not vm.preempted and self.notice is not None and self.off_at is None:
            self.say(Kind.REPRIEVE, value=str(self.notice))
            self.notice = None

    def _tell_notice(self, deadline: int) -> None:
        self.notice = max(0, deadline)
        self.say(Kind.NOTICE, value=str(self.notice))

    def _mount(self, vm: LocalVm) -> None:
        """The disk it was told of, once the device is there; never another."""
        if self.leaving or self.mounted is not None or self.disk is None or self.job is None:
            return
        wanted = names.disk_name(self.world.stack.stack, self.job, self.node, self.disk)
        if any((disk.source or "").endswith(f"/{wanted}") for disk in vm.wire.disks or []):
            self.mounted = wanted
            self.say(Kind.ATTACHED, 0, str(self.disk))
            newest = self.world.commits.get(wanted)
            if newest is not None:
                self.say(Kind.CHECKPOINT, 0, f"{newest[0]}-{newest[1]}")

    def _train(self) -> None:
        """A step a second, when all members of the generation do; a commit every ten."""
        if not self.alive or not self.world.whole(self):
            return
        self.step_no += 1
        if self.step_no % 10 == 0:
            self.world.commit(self)
        if self.world.crashing and self.node == self.world.crashing - 1:
            self.world.crashing = 0
            self.alive = False
            self.say(Kind.EXIT, self.gen, "1")
        elif self.world.finishing:
            self.alive = False
            self.say(Kind.EXIT, self.gen, "0")

    def _stop(self) -> None:
        """Told to save and stop: a save takes two seconds; what is not whole stops at the deadline."""
        doc, now = self.doc, self.world.now
        if doc is None or doc.state is not DocState.SAVE_STOP or doc.gen != self.gen:
            return
        if self.alive:
            self.saved_at = self.saved_at or now + SAVE_S
            late = doc.deadline is not None and now + self.skew >= doc.deadline
            if not late and (now < self.saved_at or not self.world.whole(self)):
                return
            self.world.commit(self)
            self.alive = False
        self.say(Kind.RELEASED, doc.gen, str(self.step_no))

    # -- the function

    def _ask(self) -> None:
        now = self.world.now
        if self.asking is not None and now - self.asked_at < TIMEOUT_S:
            return
        calm = self.alive and not self.outbox and self.doc is not None and self.doc.state is DocState.RUN
        if now - self.asked_at < (POLL_S if calm else FAST_S):
            return
        self.requests += 1
        self.asking, self.asked_at = self.requests, now
        request, sent = self.requests, tuple(self.outbox)
        sync = Sync(self.boot, self.ver, self.job, sent, self._progress())
        self.world.call_function(self, sync, lambda answer: self._hear(request, sent, answer))

    def _progress(self) -> Progress | None:
        if not self.alive or self.doc is None or not self.doc.members or self.doc.members[0].uid != self.who.uid:
            return None
        commit = self.world.newest.get(self.job or "")
        gen, step = commit or (None, None)
        return Progress(self.gen, self.step_no, 0.0, commit_gen=gen, commit_step=step, save_s=SAVE_S)

    def _hear(self, request: int, sent: tuple[FactIn, ...], answer: SyncReply | None) -> None:
        """An answer, or None: it was lost. One that comes after its time is nobody's."""
        if request != self.asking:
            return
        self.asking = None
        if answer is None or self.hung:
            return
        self.heard, self.lease_s = self.world.now, answer.lease_minutes * 60.0
        self.role = answer.role
        if answer.role is not Role.UNKNOWN:
            self.outbox = [fact for fact in self.outbox if fact not in sent]
        if answer.role is Role.SUPERSEDED:
            self._leave()
        elif answer.role in (Role.MEMBER, Role.STANDBY):
            self._obey(answer)

    def _obey(self, answer: SyncReply) -> None:
        assert answer.job is not None and answer.node is not None and answer.attempt is not None
        self.job, self.node, self.attempt, self.disk = answer.job, answer.node, answer.attempt, answer.disk
        if answer.role is Role.STANDBY:  # not admitted yet, or anew: what is so is said again
            self.said = {fact for fact in self.said if fact[0] not in (Kind.ATTACHED, Kind.CHECKPOINT, Kind.NOTICE)}
            if self.notice is not None:
                self._tell_notice(self.notice)
            if self.mounted is not None:
                self.say(Kind.ATTACHED, 0, str(self.disk))
        doc = answer.doc
        if doc is None or doc.ver <= self.ver:
            return
        self.ver, self.doc = doc.ver, doc
        if answer.role is not Role.MEMBER:
            self.alive = False
            return
        if doc.state is DocState.ROLL_CALL:
            self.say(Kind.HERE, doc.gen, str(doc.ver))
        listed = any(m.uid == self.who.uid and m.boot == self.boot for m in doc.members)
        if doc.state in (DocState.RUN, DocState.ROLL_CALL) and listed and doc.gen > self.gen:
            self.gen, self.alive, self.saved_at, self.step_no = doc.gen, True, None, 0
            self.launched = doc
            self.world.began(self)

    def _leave(self) -> None:
        """Superseded: end, unmount, say so, power off."""
        self.alive, self.leaving = False, True
        if self.mounted is not None:
            self.mounted = None
            self.say(Kind.FREED, 0, str(self.disk or 0))
        if not self.outbox and self.off_at is None:
            self.off_at = self.world.now + SHUTDOWN_S
