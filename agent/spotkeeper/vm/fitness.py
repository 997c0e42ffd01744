"""The quick part of preflight at every start of the agent, and once a job whether the gang's first machine can be
reached: in threads, and nothing waits for them.

What it finds goes to the log with its remedy. An error is also a fact, said in each generation that this machine is a
member of, because only members are heard; so ``status`` warns of it for as long as it may matter. It ends nothing and
keeps nobody from training: a check may be wrong, and what is broken fails by itself.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from spotkeeper.spec.facts import Kind
from spotkeeper.vm.checks import PEERS
from spotkeeper.vm.metadata import Metadata
from spotkeeper.vm.preflight import Check, Finding, Level, Place, Report, boot_checks, examine
from spotkeeper.vm.standing import Standing

PORTS = 64  # of a job; a generation's is the first of them + its number mod 64


class Fitness:
    """``begin`` and ``go_on`` are for the loop's thread. ``checks``: called in the other."""

    def __init__(self, me: Standing, metadata: Metadata, checks: Callable[[], tuple[Check, ...]] = boot_checks) -> None:
        self._me = me
        self._metadata = metadata
        self._checks = checks
        self._errors: tuple[str, ...] = ()  # of the boot; set once, by the thread
        self._cut_off: str | None = None  # the job whose first machine is out of reach; set by a thread
        self._tried: str | None = None  # the job for which that was looked at
        self._told: tuple[str | None, int, tuple[str, ...]] | None = None  # job, generation, what

    def begin(self) -> None:
        threading.Thread(target=self._look, name="fitness", daemon=True).start()

    def go_on(self) -> None:
        """Say what is wrong, where it is heard and has not been said."""
        me, doc = self._me, self._me.doc
        place = me.place(doc) if doc is not None else None
        if doc is None or place is None:
            return
        if place[0] > 0 and self._tried != me.job:
            self._tried = me.job
            # A port of the job's own block of 64, so that the same rules apply, and not the one it meets on.
            where = f"{doc.master}:{doc.port + (-1 if doc.gen % PORTS else 1)}"
            threading.Thread(target=self._reach, args=(me.job, where), name="reach", daemon=True).start()
        errors = self._errors + (("peers",) if me.job is not None and self._cut_off == me.job else ())
        if errors and self._told != (me.job, doc.gen, errors):
            self._told = me.job, doc.gen, errors
            for name in errors:
                me.say(Kind.AMISS, name)

    def _reach(self, job: str | None, master: str) -> None:
        """Members are there before a document lists them, so one that refuses is reached, whether it listens yet or
        not."""
        for one in examine((PEERS,), Place(peers=(master,))):
            self._log(one)
            if one.level is Level.ERROR:
                self._cut_off = job

    def _look(self) -> None:
        settings, log = self._me.settings, self._me.log
        notice_s = self._me.clock.real_s(settings.notice_s)
        place = Place(metadata=self._metadata, folder=settings.mount, notice_s=notice_s, environ=dict(os.environ))
        report = Report.of(examine(self._checks(), place))
        for one in report.findings:
            self._log(one)
        log("preflight.done", level=report.level.value, checks=len(report.findings))
        self._errors = tuple(one.check for one in report.findings if one.level is Level.ERROR)

    def _log(self, one: Finding) -> None:
        if one.level in (Level.WARNING, Level.ERROR):
            self._me.log("preflight", check=one.check, level=one.level.value, found=one.found, remedy=one.remedy)
