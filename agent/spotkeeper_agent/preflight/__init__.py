"""Checks in bounded time whether a machine is fit to train and to be preempted, and names a remedy for each problem.

Run it on a machine of a stack as ``python -m spotkeeper_agent.preflight``; elsewhere ``spotkeeper preflight`` runs the
same checks. Preflight leaves nothing behind, needs no special rights, and gives the reason for each skipped check.
``checks.py`` clock, metadata, disk, kernel, network · ``checks_gpu.py`` accelerators · ``findings.py`` results.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from spotkeeper.clock import Clock
from spotkeeper.contract.facts import Kind
from spotkeeper_agent import cloud
from spotkeeper_agent.cloud.metadata import EC2_ENDPOINT, GCE_HOST, Metadata, MetadataError
from spotkeeper_agent.core.settings import notice_s
from spotkeeper_agent.core.state import MachineState
from spotkeeper_agent.preflight.findings import Check, Finding, Level, Machine, Report, examine

MOUNT = Path("/mnt/sk-data")
PORTS = 64  # ports per job; a generation uses the first one + its number modulo 64


def all_checks() -> tuple[Check, ...]:
    """Return all checks, in the order in which a report lists their findings."""
    from spotkeeper_agent.preflight import checks, checks_gpu

    return (*checks.CHECKS, *checks_gpu.CHECKS)


def boot_checks() -> tuple[Check, ...]:
    return tuple(check for check in all_checks() if check.boot)


def here(folder: Path | None, peers: tuple[str, ...], notice: float | None, python: str) -> Machine:
    """Describe this machine for the checks. ``folder`` defaults to the data disk, ``notice`` to the pool's notice."""
    metadata = _metadata()
    return Machine(
        metadata=metadata,
        folder=folder or (MOUNT if MOUNT.is_dir() else Path.cwd()),
        notice_s=notice_s(_attributes(metadata).get("sk-notice-s")) if notice is None else notice,
        peers=peers,
        python=python,
        fabric=_attributes(metadata).get("sk-fabric", ""),
        environ=dict(os.environ),
    )


def _metadata() -> Metadata | None:
    """Return this machine's metadata client, or None if neither firmware nor environment names a cloud."""
    named = GCE_HOST in os.environ or EC2_ENDPOINT in os.environ
    if not named and not cloud.vendor().startswith(("Google", "Amazon")):
        return None
    return cloud.here(Clock.from_env())


def _attributes(metadata: Metadata | None) -> dict[str, str]:
    try:
        return metadata.instance().attributes if metadata else {}
    except MetadataError:
        return {}


class Fitness:
    """The agent's preflight: quick checks when it starts, and one check per job: is the gang's first machine reachable?

    The checks run in threads; nothing waits for them. Findings go to the log. While this machine is a member, an error
    is also reported as PREFLIGHT_FAILED in each generation, so that ``spotkeeper status`` shows a warning. No finding
    ends a job or keeps the machine from training: a check may be wrong, and a real fault shows by itself. The loop's
    thread calls ``begin`` and ``go_on``; another thread calls ``checks``.
    """

    def __init__(
        self, machine: MachineState, metadata: Metadata, checks: Callable[[], tuple[Check, ...]] = boot_checks
    ) -> None:
        self._machine = machine
        self._metadata = metadata
        self._checks = checks
        self._errors: tuple[str, ...] = ()  # failed checks of this boot; set once, by the thread
        self._cut_off: str | None = None  # the job whose master cannot be reached; set by a thread
        self._tried: str | None = None  # the job for which the connection was checked
        self._told: tuple[str | None, int, tuple[str, ...]] | None = None  # reported job, generation and checks

    def begin(self) -> None:
        threading.Thread(target=self._run_checks, name="fitness", daemon=True).start()

    def go_on(self) -> None:
        """Report the failed checks in each generation and when more fail; once per job, check the gang's first machine.

        The agent's loop calls this repeatedly; the check of the first machine runs in a thread.
        """
        machine, doc = self._machine, self._machine.doc
        place = machine.member_of(doc) if doc is not None else None
        if doc is None or place is None:
            return
        if place[0] > 0 and self._tried != machine.job:
            self._tried = machine.job
            # A port of the job's block, which the same firewall rules cover, but not the rendezvous port itself.
            where = f"{doc.master}:{doc.port + (-1 if doc.gen % PORTS else 1)}"
            threading.Thread(target=self._reach, args=(machine.job, where), name="reach", daemon=True).start()
        errors = self._errors + (("peers",) if machine.job is not None and self._cut_off == machine.job else ())
        if errors and self._told != (machine.job, doc.gen, errors):
            self._told = machine.job, doc.gen, errors
            for name in errors:
                machine.say(Kind.PREFLIGHT_FAILED, name)

    def _reach(self, job: str | None, master: str) -> None:
        """Check that the address ``master`` is reachable; a refused connection shows that it is."""
        from spotkeeper_agent.preflight.checks import PEERS

        for one in examine((PEERS,), Machine(peers=(master,))):
            self._log(one)
            if one.level is Level.ERROR:
                self._cut_off = job

    def _run_checks(self) -> None:
        settings, log = self._machine.settings, self._machine.log
        notice_s = self._machine.clock.real_s(settings.notice_s)
        examined = Machine(
            metadata=self._metadata,
            folder=settings.mount,
            notice_s=notice_s,
            fabric=settings.fabric,
            environ=dict(os.environ),
        )
        report = Report.of(examine(self._checks(), examined))
        for one in report.findings:
            self._log(one)
        log("preflight.done", level=report.level.value, checks=len(report.findings))
        self._errors = tuple(one.check for one in report.findings if one.level is Level.ERROR)

    def _log(self, one: Finding) -> None:
        if one.level in (Level.WARNING, Level.ERROR):
            self._machine.log("preflight", check=one.check, level=one.level.value, found=one.found, remedy=one.remedy)
