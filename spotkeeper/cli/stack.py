"""Finds the stack that a command is for, checks job files against it, and notes if its function or cloud is down."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from spotkeeper.cli.output import note, note_problems
from spotkeeper.client import find_target, lookup
from spotkeeper.client.errors import CliError
from spotkeeper.client.target import Target, attach, folder_option, silence
from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.parse.problem import SpecError
from spotkeeper.contract.stack import DEFAULT_TEAM, StackState
from spotkeeper.reconcile.store.documents import CorruptError
from spotkeeper.reconcile.store.objects import StoreError
from spotkeeper.reconcile.store.store import Store

if TYPE_CHECKING:
    from spotkeeper.contract.parse.jobfile import Overrides


def open_stack(stack: str | None) -> tuple[Target, Store]:
    """Return the stack and its bucket. The stack's document may be unreadable: requests and logs work without it.

    Raises:
        CliError: no such stack, or the bucket belongs to another stack.
    """
    target = find_target(stack)
    store = target.store()
    with contextlib.suppress(CorruptError):
        target.state(store)
    return target, store


def stack_for(stack: str | None, file: Path) -> tuple[Target, Store, StackState]:
    """Return the stack for a job file, its bucket, and its document.

    Raises:
        CliError, StoreError: no such stack, or the bucket failed (after the job file's own problems are printed).
    """
    from spotkeeper.contract.parse.jobfile import read_job

    try:
        target = find_target(stack)
        store = target.store()
        state = target.state(store)
    except (CliError, StoreError):
        try:
            read_job(file, None, 0.0)
        except SpecError as error:
            note_problems(str(error))
        raise
    return target, store, state


def checked(
    target: Target, store: Store, state: StackState, file: Path, overrides: Overrides, since: float | None = None
) -> JobSpec:
    """Read a job file, check it against the stack, and print cautions and warnings.

    Args:
        since: when a resumed job was submitted (virtual unix seconds); its deadline counts from then.

    Raises:
        SpecError: all problems of the file.
    """
    from spotkeeper.contract.parse.jobfile import read_job

    now = target.clock.now()
    starts = lookup.starts_of(store, state, now, target.clock.scale)
    spec = read_job(file, state, now if since is None else since, starts, overrides)
    note_cautions(store, state, file, spec, now)
    return spec


def note_cautions(store: Store, state: StackState, file: Path, spec: JobSpec, now: float) -> None:
    """Print what is allowed in a job but can surprise."""
    from spotkeeper.cli.jobs.foresee import warnings
    from spotkeeper.contract.parse.check import cautions

    for line in cautions(spec, state, lookup.prices_of(store, state), now):
        note(f"note: {line}")
    for line in warnings(file, spec, state):
        note(f"warning: {line}")


def unheard(target: Target, what: str, *, new: bool = False) -> str:
    """Return the note for a user whose request did not reach the function.

    ``what``: what the next tick does, such as "starts the job"; if ticks fail, the note says this instead. ``new``:
    whether the function does not know yet who submitted it.
    """
    store, owner = target.store(), ""
    with contextlib.suppress(StoreError):
        stack = store.read_stack()
        if no_tick := silence(store, stack, target):
            return f"cannot reach the function from here, and {no_tick}"
        if new and stack is not None and stack.teams:
            owner = f" for team {DEFAULT_TEAM}; to tell whose it is, submit it again"
    return f"cannot reach the function from here: the next tick {what}{owner}"


def note_upkeep(folder: Path | None) -> None:
    """Print a note and the remedy if the one-machine cloud in ``folder`` is not running."""
    if folder is None:
        return
    from spotkeeper.local.lifecycle.cloud import Upkeep

    cloud = attach(folder)
    words = {
        Upkeep.STOPPED: "is not running: its VMs run on, but nothing starts, stops or replaces VMs",
        Upkeep.UNWATCHED: "has lost its keeper process: it keeps running, but nothing would restart its control plane",
    }
    if cloud.upkeep in words:
        again = f"spotkeeper local up {folder_option(cloud.folder)}"
        note(f"the cloud in {cloud.folder} {words[cloud.upkeep]}\n  try: {again}")
