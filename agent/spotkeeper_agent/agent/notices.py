"""Handles preemption notices: reports and stores them, and has the job save as often as time allows.

``cloud/notice.py`` derives a notice, and its withdrawal, from the cloud's warnings.
"""

from __future__ import annotations

import time

from spotkeeper.contract.facts import Kind
from spotkeeper_agent.cloud import notice as notices
from spotkeeper_agent.cloud.notice import Change, Instance, Notice
from spotkeeper_agent.core.state import AgentState, MachineState
from spotkeeper_agent.job.supervisor import Supervisor

RESERVE_S = 8.0  # real; time to detect, agree, hash and report; at most a quarter of the notice
LATE_S = 5.0  # real; shortest time given to a save after the deadline


class NoticeHandler:
    """Handles the notices of one machine. Only the loop's thread may call it."""

    def __init__(self, machine: MachineState, supervisor: Supervisor) -> None:
        self._machine = machine
        self._super = supervisor
        self._saved_for: tuple[int, Notice] | None = None  # generation and notice for which a save was requested

    def observed(self, instance: Instance) -> None:
        """Process the newest state that the metadata server shows."""
        machine, now = self._machine, self._machine.clock.now()
        change = notices.observe(machine.saved.notice, instance, machine.settings.notice_s, now)
        self._report(change)

    def _report(self, change: Change) -> None:
        """Report a new notice before the old one's withdrawal: without a notice the replacement would be cancelled."""
        machine = self._machine
        if change.given is not None:
            self.give(change.given)
        if change.withdrawn is not None:
            machine.log("notice.withdrawn", cause=change.withdrawn.cause.value)
            machine.say(Kind.REPRIEVE, str(change.withdrawn.deadline))
            if change.given is None:
                machine.save(notice=None)

    def give(self, given: Notice) -> None:
        machine = self._machine
        machine.log("notice", cause=given.cause.value, within_s=round(given.deadline - machine.clock.now(), 1))
        machine.save(notice=given)
        machine.say(Kind.NOTICE, str(given.deadline))

    def act(self) -> None:
        """Request a save at once, and later a save-and-stop, just in time to end with a reserve before the deadline.

        If the time does not suffice for both, only the save-and-stop is requested. A generation that begins after the
        deadline is saved and stopped at once. Usually the function stops the job earlier, when the replacement is
        ready.
        """
        clock = self._machine.clock
        self._report(notices.prolong(self._machine.saved.notice, clock.now()))
        given, child = self._machine.saved.notice, self._super.child
        if given is None or child is None or child.saving:
            return
        left_s = clock.real_s(given.deadline - clock.now())
        reserve_s = max(0.0, min(RESERVE_S, 0.25 * clock.real_s(given.deadline - given.at)))
        need_s = child.need_s + reserve_s
        if left_s <= need_s:
            self._machine.become(AgentState.SAVING)
            within_s = left_s - 0.25 * reserve_s if left_s > 0 else max(child.need_s, LATE_S)
            self._super.save_and_stop(time.time() + within_s)
        elif not child.signals and self._saved_for != (child.gen, given) and left_s > need_s + child.control.save_s:
            self._saved_for = child.gen, given
            self._super.save()
