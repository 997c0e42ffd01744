"""Tears a job down: ends its processes, launcher and saver, unmounts the disk and reports.

After the teardown the agent powers the machine off, idles or exits. Each step is repeated until it is done, so no
process can write to a disk that is reported as free. Other modules decide whether to tear down: on the function's
reply, after too long without one, or at a shutdown.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from spotkeeper.contract.facts import Kind
from spotkeeper.contract.generation import FactIn
from spotkeeper_agent.agent.components import Components
from spotkeeper_agent.agent.membership import Membership
from spotkeeper_agent.core.state import AgentState, MachineState
from spotkeeper_agent.host.systemd import power_off

LAST_WORDS_S = 5.0  # real; facts that are not delivered by then stay in the spool
SAVER_END_S = 20.0  # real; time for a running save


class Then(Enum):
    """The action that follows a teardown."""

    POWER_OFF = "power off"
    IDLE = "idle"
    EXIT = "exit"  # the system is going down


@dataclass
class Departure:
    """A teardown: its reason, the action after it, whether the job saves first, and its progress."""

    why: str
    then: Then
    save: bool = False
    deadline: float | None = None  # for the save, real unix seconds
    attempt: int | None = None  # the attempt that the function names, if this boot has no assignment
    over: bool = False  # the job has ended: delete its folder from a static machine's disk
    moves: bool = False  # the job moves to another zone: delete its scratch folder, which is not to be copied
    began: float | None = None  # monotonic, once the job has ended
    unmounted: bool = False
    said_at: float | None = None  # monotonic, when the end was reported


class Teardown:
    """Carries out a teardown. ``departure``: the current one, if any."""

    def __init__(self, machine: MachineState, components: Components, membership: Membership) -> None:
        self._machine = machine
        self._components = components
        self._membership = membership
        self.departure: Departure | None = None

    def begin(self, departure: Departure) -> None:
        self._machine.log("leave", why=departure.why, then=departure.then.value)
        self.departure = departure

    def unmounted(self) -> None:
        self._components.mounting.number = None
        if self.departure is not None:
            self.departure.unmounted = True

    def go_on(self) -> bool:
        """Take the next step; return True when the agent must exit. Called repeatedly until all steps are done."""
        departure, supervisor = self.departure, self._components.supervisor
        if departure is None:
            return False
        if supervisor.child is not None:
            self._machine.become(AgentState.SAVING if departure.save else AgentState.SUPERSEDED)
            supervisor.save_and_stop(departure.deadline) if departure.save else supervisor.discard()
            return False
        if not self._end_output(departure):
            return False
        self._machine.become(AgentState.SUPERSEDED)
        if not self._end_helpers(departure):
            return False
        if not departure.unmounted:
            job = self._machine.job if departure.moves else None
            self._components.mounting.unmount(self._ended_job() if departure.over else None, job)
            return False
        return self._report(departure)

    def _end_output(self, departure: Departure) -> bool:
        """Return True once no upload reads the job's files. During a shutdown uploads continue until the deadline."""
        if (
            self._membership.unreported is not None
            and departure.deadline is not None
            and time.time() < departure.deadline
        ):
            self._membership.upload_output()
            return False
        self._membership.unreported = None
        self._components.output.drop()
        return not self._components.output.busy

    def _ended_job(self) -> Path | None:
        """Return the job's folder on a static machine's disk, to be deleted; None if the whole disk will be deleted."""
        settings, job = self._machine.settings, self._machine.job
        return settings.mount / job if settings.static and job is not None else None

    def _end_helpers(self, departure: Departure) -> bool:
        """End launcher and saver; return True once both have ended and the disk is unused."""
        if departure.began is None:
            departure.began = time.monotonic()
            self._components.launcher.quit()
            self._components.supervisor.sweep()
        hurry = time.monotonic() - departure.began > SAVER_END_S
        free = self._components.mirror.stop()
        return (
            self._components.preparation.end_saver(hurry)
            and (self._components.launcher.gone or hurry)
            and (free or hurry)
        )

    def _report(self, departure: Departure) -> bool:
        machine, assignment = self._machine, self._machine.saved.assignment
        if departure.said_at is None:
            departure.said_at = time.monotonic()
            if assignment is not None:
                machine.say(Kind.FREED, str(assignment.disk or 0))
            attempt = assignment.attempt if assignment is not None else departure.attempt
            if attempt is not None and departure.then is Then.IDLE:
                machine.sync.say(FactIn(Kind.DROPPED, machine.gen, attempt=attempt), again=assignment is None)
        patience = time.monotonic() - departure.said_at
        # A static machine's grant is released only by this report, so the machine repeats it until it is delivered.
        if machine.sync.undelivered() and (departure.then is Then.IDLE or patience < LAST_WORDS_S):
            return False
        self.departure = None
        if departure.then is Then.IDLE:
            self._idle(departure)
            return False
        if departure.then is Then.POWER_OFF:
            power_off(machine.log)
        return True

    def _idle(self, departure: Departure) -> None:
        machine, job = self._machine, self._machine.job
        self._membership.forget_job()
        if departure.over and job is not None:
            self._components.old_jobs.gone((job,))
        machine.save(assignment=None, run=None, started=-1, ended=-1)
        machine.sync.assigned(None)
        self._components.preparation.forget_sources()
        machine.become(AgentState.IDLE)
