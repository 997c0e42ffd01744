"""``dashboard``: serves the pages of :mod:`spotkeeper.dashboard` to a browser on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spotkeeper.cli.jobs import verbs
from spotkeeper.cli.output import emit_line, note
from spotkeeper.cli.stack import note_upkeep
from spotkeeper.client import find_target, lookup
from spotkeeper.client.errors import CliError, Exit
from spotkeeper.client.target import Target, whoami
from spotkeeper.contract.job import RequestKind
from spotkeeper.contract.record import Hold, Phase, Record
from spotkeeper.reconcile.store.store import Store

if TYPE_CHECKING:
    from spotkeeper.dashboard.actions import Commands


@dataclass(frozen=True)
class Serving:
    """The options of ``dashboard``. ``behind``: the address of the proxy that serves it to others; "" for none."""

    port: int
    browser: bool
    read_only: bool
    behind: str
    as_json: bool


def run(job: str | None, stack: str | None, options: Serving) -> None:
    """Serve the dashboard until Ctrl-C.

    Raises:
        CliError: no such stack or job, a proxy without read-only, the port is taken, or NiceGUI is not installed.
    """
    if options.behind and not options.read_only:
        why = "--behind needs --read-only: all users that the proxy lets in would act as you"
        raise CliError(why, Exit.USAGE)
    target = find_target(stack)
    store = target.store()
    target.state(store)
    note_upkeep(target.local)
    path = "/" if job is None else f"/jobs/{lookup.find_job(store, job).job}"
    try:
        import nicegui  # noqa: F401
    except ImportError:
        why = "the dashboard needs NiceGUI, which is not installed"
        raise CliError(why, Exit.FAILED, "pip install 'spotkeeper[dashboard]'") from None
    from spotkeeper.dashboard.feed import JobFeed
    from spotkeeper.dashboard.server import Address, serve

    def up(address: Address) -> None:
        if options.as_json:
            emit_line(address)
        elif options.behind:
            note(f"serving {options.behind} on port {address.port} of this machine; Ctrl-C ends it")
        else:
            note(f"dashboard of {target.stack}: {address.url}")
            note("  the address works once, within half an hour; Ctrl-C ends the dashboard")

    made = commands(target, store, read_only=options.read_only)
    serve(JobFeed(target), made, up, port=options.port, path=path, browser=options.browser, proxy=options.behind)


def commands(target: Target, store: Store, *, read_only: bool) -> Commands:
    """Return the actions of the dashboard's pages; each runs the code of the command of the same name."""
    from spotkeeper.dashboard.actions import Action, Commands

    def request(kind: RequestKind, record: Record, **fields: str | int | None) -> str:
        asked = lookup.new_request(kind, target.clock.now(), whoami(), **fields)
        lookup.send_request(store, record, asked)
        unreached = verbs.tell(target, store, record, asked)
        return f"{record.name}: requested: {verbs.words(asked)}" + (f"; {unreached}" if unreached else "")

    def plain(kind: RequestKind) -> Callable[[Record, str], str]:
        return lambda record, _: request(kind, record)

    def resize(record: Record, value: str) -> str:
        if not (value.isdecimal() and len(value) < 6 and 1 <= int(value) <= 10_000):
            raise CliError(f"{value!r} is not a number of machines: enter 1 to 10,000", Exit.USAGE)
        return request(RequestKind.RESIZE, record, nodes=int(value))

    def move(record: Record, value: str) -> str:
        verbs.check_zone(store, record, value)
        return request(RequestKind.MOVE, record, zone=value)

    def drill(record: Record, _: str) -> str:
        from spotkeeper.cli.jobs import drill as drilling
        from spotkeeper.cli.jobs.preempt import check, preempt

        state = target.state(store)
        check(target, state, announced=True)
        fresh = lookup.record_of(store, record.job)
        victim = drilling.choose(store, state, fresh, None, announced=True, now=target.clock.now())
        preempt(target, state, victim)
        return f"{victim.vm} (node {victim.node}) gets a preemption notice"

    def checkpoints(record: Record) -> list[tuple[str, ...]]:
        from spotkeeper.cli.jobs.checkpoints import cells, known

        return [cells(row) for row in known(store, record, time.time())]

    def runs(record: Record) -> bool:
        return record.phase is Phase.RUN

    kept = "The job ends, and its machines, disks and checkpoints are deleted (keep_disks keeps the disks)."
    actions = {
        "pause": Action(
            "Pause",
            "The job saves a checkpoint (with stop: signal the script gets the signal and saves by itself), then its"
            " machines are deleted.",
            plain(RequestKind.PAUSE),
            offered=lambda record: runs(record) or record.hold is Hold.QUEUE,
        ),
        "resume": Action(
            "Resume",
            "The job requests machines and continues from its newest checkpoint.",
            plain(RequestKind.RESUME),
            offered=lambda record: record.hold is not None and not record.hold.passes,
        ),
        "resize": Action(
            "Resize",
            "All machines save and stop; training continues on the number that you enter.",
            resize,
            "Machines",
            offered=runs,
        ),
        "move": Action(
            "Move",
            "Each node gets a machine in the zone that you enter; then all save, stop and continue there.",
            move,
            "Zone",
            offered=runs,
        ),
        "drill": Action(
            "Drill",
            "One machine gets a preemption notice, as from the cloud, and the job recovers.",
            drill,
            offered=lambda record: runs(record) and record.gen > 0,
        ),
        "cancel": Action("Cancel", kept, plain(RequestKind.CANCEL), danger=True),
    }
    return Commands(actions, checkpoints, read_only)
