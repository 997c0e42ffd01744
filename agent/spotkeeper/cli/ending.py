"""The question before a cloud of this machine goes for good: which jobs would lose their checkpoints with it.

It reads the bucket and asks; it destroys nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from spotkeeper.cli import jobs
from spotkeeper.cli.errors import CliError, Exit
from spotkeeper.cli.output import note
from spotkeeper.cli.target import Target
from spotkeeper.reconcile.store_api import Store
from spotkeeper.report.lines import title
from spotkeeper.spec.job import AskKind
from spotkeeper.spec.record import Phase, Record


def agree(target: Target, yes: str, *, ask: bool) -> None:
    """Return where nothing is lost, or a person at the terminal says that it may be.

    Args:
        yes: the command that goes on without a question.
        ask: whether somebody can be asked; never where no terminal is.

    Raises:
        CliError: jobs would lose their checkpoints, and nobody agreed.
        StoreError: the bucket cannot be read.
    """
    lost = list(losers(target))
    if not lost:
        return
    told = "these jobs are not over, and lose their checkpoints with the cloud:\n" + "\n".join(lost)
    if not (ask and sys.stdin.isatty() and sys.stderr.isatty()):
        raise CliError(told, Exit.REFUSED, f"wait for them, end them (spotkeeper cancel JOB), or: {yes}")
    import typer

    note(told)
    if not typer.confirm("Destroy all of it?", err=True):
        raise CliError("nothing was changed", Exit.REFUSED)


def losers(target: Target) -> Iterator[str]:
    """A line for every job that is not over and that nobody has cancelled."""
    store = target.store()
    found = jobs.all_jobs(store, finished=False)
    for record in found.records:
        if not _ends(store, record):
            view = jobs.view_of(store, record, None, target.clock.now())
            yield f"  {title(view)}, " + (f"step {view.step}" if view.step is not None else "no step reported yet")
    yield from (f"  {one.job}: its record cannot be read" for one in found.unreadable)


def _ends(store: Store, record: Record) -> bool:
    over = record.phase in (Phase.END, Phase.DONE)
    return over or any(ask.kind is AskKind.CANCEL for ask in store.list_asks(record.job))
