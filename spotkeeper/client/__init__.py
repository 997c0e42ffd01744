"""Shared by the command and the Pulumi program: find a stack, submit and look up jobs, notify the function.

``target.py`` the stack, its bucket and function · ``pack.py`` a source folder as a tar · ``submit.py`` a new job ·
``sweep.py`` a search's trials · ``space.py`` their values · ``sweep_status.py`` what is known of them ·
``lookup.py`` jobs and requests · ``reads.py`` repeated reads · ``logs.py`` stored logs · ``errors.py``

:func:`find_target` looks for the stack in this order: ``--stack`` with ``SPOTKEEPER_BUCKET``; ``SPOTKEEPER_STACK`` with
``SPOTKEEPER_BUCKET``; the one-machine cloud in ``SPOTKEEPER_FOLDER``; the one-machine cloud whose folder
``.spotkeeper/local`` is in the working folder or above it.
"""

from __future__ import annotations

import os
from pathlib import Path

from spotkeeper.client.errors import CliError, Exit
from spotkeeper.client.target import Target, export_bucket, local_folder, local_target, named_folder
from spotkeeper.clock import Clock


def find_target(stack: str | None, start: Path | None = None) -> Target:
    """Return the stack that ``--stack``, the environment or the folder ``start`` names; raise CliError if none does."""
    name = stack or os.environ.get("SPOTKEEPER_STACK", "")
    bucket = os.environ.get("SPOTKEEPER_BUCKET", "")
    folder = named_folder() or local_folder(start or Path.cwd())
    if bucket and name:
        return Target(name, bucket, _clock(), function_url=os.environ.get("SPOTKEEPER_FUNCTION", ""))
    if bucket:
        remedy = "export SPOTKEEPER_STACK=...; or, for the cloud on this machine, unset SPOTKEEPER_BUCKET"
        raise CliError("SPOTKEEPER_BUCKET is set, but no stack is named", Exit.USAGE, remedy)
    if folder is not None and name in ("", "local"):
        return local_target(folder)
    if name:
        here = f", and the one-machine cloud in {folder} is another stack, `local`" if folder is not None else ""
        raise CliError(f"no stack {name}: SPOTKEEPER_BUCKET is not set{here}", Exit.MISSING, export_bucket(name))
    raise CliError(
        "no stack: SPOTKEEPER_STACK and SPOTKEEPER_BUCKET are not set, and this folder and its parents have no "
        ".spotkeeper/local",
        Exit.MISSING,
        "on this machine: spotkeeper local up; for a local cloud in another folder: export SPOTKEEPER_FOLDER=..."
        "/.spotkeeper/local; in a cloud: export SPOTKEEPER_STACK=... SPOTKEEPER_BUCKET=gs://...",
    )


def _clock() -> Clock:
    try:
        return Clock.from_env()
    except ValueError as error:
        raise CliError(str(error), Exit.USAGE) from None
