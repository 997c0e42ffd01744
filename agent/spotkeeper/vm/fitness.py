"""The quick part of preflight at every start of the agent, in a thread: nothing waits for it.

What it finds goes to the log with its remedy. An error is also a fact, said in each generation that this machine is a
member of, because only members are heard; so ``status`` warns of it for as long as it may matter. It ends nothing and
keeps nobody from training: a check may be wrong, and what is broken fails by itself.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from spotkeeper.spec.facts import Kind
from spotkeeper.vm.metadata import Metadata
from spotkeeper.vm.preflight import Check, Level, Place, Report, boot_checks, examine
from spotkeeper.vm.standing import Standing


class Fitness:
    """``begin`` and ``go_on`` are for the loop's thread. ``checks``: called in the other."""

    def __init__(self, me: Standing, metadata: Metadata, checks: Callable[[], tuple[Check, ...]] = boot_checks) -> None:
        self._me = me
        self._metadata = metadata
        self._checks = checks
        self._errors: tuple[str, ...] = ()  # set once, by the thread
        self._told: tuple[str | None, int] | None = None  # job and generation

    def begin(self) -> None:
        threading.Thread(target=self._look, name="fitness", daemon=True).start()

    def go_on(self) -> None:
        """Say what is wrong, where it is heard and has not been said."""
        me, doc = self._me, self._me.doc
        if not self._errors or doc is None or me.place(doc) is None or self._told == (me.job, doc.gen):
            return
        self._told = me.job, doc.gen
        for name in self._errors:
            me.say(Kind.AMISS, name)

    def _look(self) -> None:
        settings, log = self._me.settings, self._me.log
        notice_s = self._me.clock.real_s(settings.notice_s)
        place = Place(metadata=self._metadata, folder=settings.mount, notice_s=notice_s, environ=dict(os.environ))
        report = Report.of(examine(self._checks(), place))
        for one in report.findings:
            if one.level in (Level.WARNING, Level.ERROR):
                log("preflight", check=one.check, level=one.level.value, found=one.found, remedy=one.remedy)
        log("preflight.done", level=report.level.value, checks=len(report.findings))
        self._errors = tuple(one.check for one in report.findings if one.level is Level.ERROR)
