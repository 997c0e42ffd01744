"""The entry point of the command: it runs the command line and turns errors into messages and exit codes.

This module has no slow imports: ``spotkeeper --help`` must answer at once.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from typer.main import get_command

from spotkeeper.cli import for_jobs, for_planning, for_running_jobs, for_stacks  # the imports add their commands
from spotkeeper.cli.app import JOBS, STACKS, app
from spotkeeper.cli.for_sweeps import app as sweep_app
from spotkeeper.cli.local.commands import app as local_app
from spotkeeper.cli.output import note, note_problems
from spotkeeper.client.errors import CliError, Exit

__all__ = ["JOBS", "STACKS", "app", "for_jobs", "for_planning", "for_running_jobs", "for_stacks", "main", "run"]

# Errors of a file that its user can mend; others, such as a missing file of the program's own, are bugs.
NOT_BUGS = {
    *(errno.EACCES, errno.EDQUOT, errno.EISDIR, errno.ELOOP),
    *(errno.ENAMETOOLONG, errno.ENOSPC, errno.ENOTDIR, errno.EROFS),
}
REMEDY = "name another file or folder, or mend this one's rights or disk"
SHOWN = 200  # characters of a file's name

app.add_typer(sweep_app, name="sweep", rich_help_panel=JOBS)
app.add_typer(local_app, name="local", rich_help_panel="Without a cloud")


def main(argv: list[str] | None = None) -> None:
    """Run a command; errors are printed as text and set the exit code."""
    sys.exit(run(argv))


def run(argv: list[str] | None = None) -> int:
    """Run a command line and return its exit code. ``argv``: None for the process's own arguments."""
    try:
        _command()(args=argv, prog_name="spotkeeper")
    except SystemExit as error:  # typer exits in any case; it has printed a usage error already
        return error.code if isinstance(error.code, int) else Exit.OK
    except Exception as error:
        code = _expected(error)
        if code is None:
            raise
        return code
    return Exit.OK


@cache
def _command() -> Callable[..., Any]:
    """The whole command line, built once in a process: typer reads the signatures of all commands for it."""
    return get_command(app)


def _expected(error: Exception) -> int | None:
    """Print an expected error and return its exit code; None for a bug."""
    from spotkeeper.contract.parse.problem import SpecError
    from spotkeeper.reconcile.store.documents import CorruptError
    from spotkeeper.reconcile.store.objects import StoreError

    match error:
        case CliError():
            return _fail(str(error), error.code, error.remedy)
        case SpecError():
            note_problems(str(error))
            return Exit.USAGE
        case CorruptError():
            return _fail(f"the bucket: {error}", Exit.FAILED, error.remedy)
        case StoreError():
            return _fail(*_store_error(str(error)))
        case OSError() if error.errno in NOT_BUGS and error.filename is not None:
            name = os.fsdecode(error.filename)
            shown = name if len(name) <= SHOWN else f"{name[:SHOWN]}..."
            return _fail(f"{shown}: {error.strerror}", Exit.FAILED, REMEDY)
    return None


def _store_error(text: str) -> tuple[str, Exit, str]:
    """The message, exit code and remedy of a bucket's error.

    Without a login, the store asks the metadata server, which exists only on the cloud's machines. If that fails, the
    remedy is to log in.
    """
    logins = {"GCS": "gcloud auth application-default login", "S3": "aws sso login, or set AWS_ACCESS_KEY_ID"}
    store = next((store for store in logins if f"Generic {store}" in text), "")
    if store and "169.254.169.254" in text:
        return f"the bucket: this shell is not logged in to {store}", Exit.FAILED, logins[store]
    return f"the bucket: {text}", Exit.FAILED, ""


def _fail(message: str, code: Exit, remedy: str = "") -> int:
    """Print an error and its remedy, and return the exit code."""
    note(f"error: {message}")
    if remedy:
        note(f"  try: {remedy}")
    return code


if __name__ == "__main__":
    main()
