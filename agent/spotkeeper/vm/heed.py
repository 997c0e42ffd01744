"""What is done about a notice: said, written down, and the job saved as often as the time left allows.

Which warnings there are, and whether one is withdrawn, ``notice.py`` says.
"""

from __future__ import annotations

import time

from spotkeeper.spec.facts import Kind
from spotkeeper.vm import notice as notices
from spotkeeper.vm.metadata import Instance
from spotkeeper.vm.notice import Change, Notice
from spotkeeper.vm.standing import Standing, State
from spotkeeper.vm.supervisor import Supervisor

RESERVE_S = 8.0  # real; detect, agree, hash, report (and never more than a quarter of the notice)
LATE_S = 5.0  # real, at least, to save in where the deadline is past


class Heed:
    """For the loop's thread."""

    def __init__(self, me: Standing, supervisor: Supervisor) -> None:
        self._me = me
        self._super = supervisor
        self._saved_for: tuple[int, Notice] | None = None  # generation and notice that a save was asked for

    def observed(self, instance: Instance) -> None:
        """What the metadata server says now."""
        me, now = self._me, self._me.clock.now()
        change = notices.observe(me.saved.notice, instance, me.settings.notice_s, now)
        self._tell(change)

    def _tell(self, change: Change) -> None:
        """What takes another's place is said first: without any notice the function would let its successor go."""
        me = self._me
        if change.given is not None:
            self.give(change.given)
        if change.withdrawn is not None:
            me.log("notice.withdrawn", cause=change.withdrawn.cause.value)
            me.say(Kind.REPRIEVE, str(change.withdrawn.deadline))
            if change.given is None:
                me.save(notice=None)

    def give(self, given: Notice) -> None:
        me = self._me
        me.log("notice", cause=given.cause.value, within_s=round(given.deadline - me.clock.now(), 1))
        me.save(notice=given)
        me.say(Kind.NOTICE, str(given.deadline))

    def heed(self) -> None:
        """Save at once and go on; save and stop when the time left is what a save takes, with a reserve.

        A notice too short for two saves gets one. Most often the function says stop first,
        when the replacement stands by. A machine that is there though its time is over may as well save.
        """
        clock = self._me.clock
        self._tell(notices.prolong(self._me.saved.notice, clock.now()))
        given, child = self._me.saved.notice, self._super.child
        if given is None or child is None or child.saving:
            return
        left_s = clock.real_s(given.deadline - clock.now())
        reserve_s = max(0.0, min(RESERVE_S, 0.25 * clock.real_s(given.deadline - given.at)))
        need_s = child.need_s + reserve_s
        if left_s <= need_s:
            self._me.become(State.SAVING)
            within_s = left_s - 0.25 * reserve_s if left_s > 0 else max(child.need_s, LATE_S)
            self._super.save_and_stop(time.time() + within_s)
        elif not child.signals and self._saved_for != (child.gen, given) and left_s > need_s + child.control.save_s:
            self._saved_for = child.gen, given
            self._super.save()
