"""Letting go of a job: end it, end launcher and saver, unmount, say so; then power off, idle, or just end.

One step after the other, each looked at again until it is done, so that nothing writes to a disk that is said to be
free. It does not judge whether to leave: orders, silence and a shutdown do.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from spotkeeper.spec.facts import Kind
from spotkeeper.spec.generation import FactIn
from spotkeeper.vm import power
from spotkeeper.vm.membership import Membership
from spotkeeper.vm.parts import Parts
from spotkeeper.vm.standing import Standing, State

LAST_WORDS_S = 5.0  # real; facts unsaid for longer stay in the spool
SAVER_END_S = 20.0  # real; for a save in hand


class Then(Enum):
    """What follows once this machine has let go of its job."""

    POWER_OFF = "power off"
    IDLE = "idle"
    EXIT = "exit"  # the system goes down anyway


@dataclass
class Leaving:
    """How to leave, and how far it has come."""

    why: str
    then: Then
    save: bool = False
    deadline: float | None = None  # real unix seconds, of the save
    attempt: int | None = None  # as the function knows it: an earlier boot's, where this one has none
    over: bool = False  # its job has ended: what a static node's disk has of it goes too
    began: float | None = None  # monotonic, once the job has ended
    unmounted: bool = False
    said_at: float | None = None  # monotonic


class Farewell:
    """``leaving``: what is under way, None most of the time."""

    def __init__(self, me: Standing, parts: Parts, membership: Membership) -> None:
        self._me = me
        self._parts = parts
        self._membership = membership
        self.leaving: Leaving | None = None

    def begin(self, leaving: Leaving) -> None:
        self._me.log("leave", why=leaving.why, then=leaving.then.value)
        self.leaving = leaving

    def unmounted(self) -> None:
        self._parts.mounting.number = None
        if self.leaving is not None:
            self.leaving.unmounted = True

    def go_on(self) -> bool:
        """The next step; called until there is nothing left to do. True: the agent is to end."""
        leaving, supervisor = self.leaving, self._parts.supervisor
        if leaving is None:
            return False
        if supervisor.child is not None:
            self._me.become(State.SAVING if leaving.save else State.SUPERSEDED)
            supervisor.save_and_stop(leaving.deadline) if leaving.save else supervisor.discard()
            return False
        if not self._end_output(leaving):
            return False
        self._me.become(State.SUPERSEDED)
        if not self._end_helpers(leaving):
            return False
        if not leaving.unmounted:
            self._parts.mounting.unmount(self._ended_job() if leaving.over else None)
            return False
        return self._say_goodbye(leaving)

    def _end_output(self, leaving: Leaving) -> bool:
        """True once nothing reads the job's files for the bucket. A machine that goes down uses the time it has."""
        if self._membership.unsaid is not None and leaving.deadline is not None and time.time() < leaving.deadline:
            self._membership.carry_output()
            return False
        self._membership.unsaid = None
        self._parts.output.drop()
        return not self._parts.output.busy

    def _ended_job(self) -> Path | None:
        """A static node's disk outlives its jobs: what it has of one that is over. A rank's disk goes as a whole."""
        settings, job = self._me.settings, self._me.job
        return settings.mount / job if settings.static and job is not None else None

    def _end_helpers(self, leaving: Leaving) -> bool:
        """End launcher and saver; True once both are gone, so that nothing uses the disk."""
        if leaving.began is None:
            leaving.began = time.monotonic()
            self._parts.launcher.quit()
            self._parts.supervisor.sweep()
        hurry = time.monotonic() - leaving.began > SAVER_END_S
        free = self._parts.mirror.let_go()
        return self._parts.ready.end_saver(hurry) and (self._parts.launcher.gone or hurry) and (free or hurry)

    def _say_goodbye(self, leaving: Leaving) -> bool:
        me, assignment = self._me, self._me.saved.assignment
        if leaving.said_at is None:
            leaving.said_at = time.monotonic()
            if assignment is not None:
                me.say(Kind.FREED, str(assignment.disk or 0))
            attempt = assignment.attempt if assignment is not None else leaving.attempt
            if attempt is not None and leaving.then is Then.IDLE:
                me.sync.say(FactIn(Kind.DROPPED, me.gen, attempt=attempt), again=assignment is None)
        patience = time.monotonic() - leaving.said_at
        # A static node's grant ends with its word alone, so it says it until it is heard.
        if me.sync.unsaid() and (leaving.then is Then.IDLE or patience < LAST_WORDS_S):
            return False
        self.leaving = None
        if leaving.then is Then.IDLE:
            self._idle(leaving)
            return False
        if leaving.then is Then.POWER_OFF:
            power.off(me.log)
        return True

    def _idle(self, leaving: Leaving) -> None:
        me, job = self._me, self._me.job
        self._membership.forget_job()
        if leaving.over and job is not None:
            self._parts.kept.gone((job,))
        me.save(assignment=None, run=None, started=-1, ended=-1)
        me.sync.assigned(None)
        self._parts.ready.forget_sources()
        me.become(State.IDLE)
