"""The entry point: the command line with all its commands, and how failures end it.

Nothing heavy is imported here: ``spotkeeper --help`` must answer at once.
"""

from __future__ import annotations

import sys

from spotkeeper.cli import for_jobs, for_stacks  # they add their commands
from spotkeeper.cli.app import JOBS, STACKS, app
from spotkeeper.cli.errors import CliError, Exit

__all__ = ["JOBS", "STACKS", "app", "for_jobs", "for_stacks", "main", "run"]


def main(argv: list[str] | None = None) -> None:
    """Entry point: runs a command and turns every failure into words and an exit code."""
    sys.exit(run(argv))


def run(argv: list[str] | None = None) -> int:
    """The exit code of a command line (``None``: the process's own)."""
    try:
        app(args=argv, prog_name="spotkeeper")
    except SystemExit as error:  # how typer ends, well or with a usage error that it has shown
        return error.code if isinstance(error.code, int) else Exit.OK
    except Exception as error:
        code = _known(error)
        if code is None:
            raise
        return code
    return Exit.OK


def _known(error: Exception) -> int | None:
    """Say what was wrong, and the exit code; None for what only a bug can be."""
    from spotkeeper.reconcile.store_api import CorruptError, StoreError
    from spotkeeper.spec.problem import SpecError

    match error:
        case CliError():
            return _fail(str(error), error.code, error.remedy)
        case SpecError():
            return _fail(str(error), Exit.USAGE)
        case CorruptError():
            return _fail(f"the bucket: {error}", Exit.FAILED, error.remedy)
        case StoreError():
            return _fail(*_no_login(str(error)))
    return None


def _no_login(text: str) -> tuple[str, Exit, str]:
    """A shell without a login asks the metadata server that only a machine of the cloud has."""
    logins = {"GCS": "gcloud auth application-default login", "S3": "aws sso login, or AWS_ACCESS_KEY_ID and the like"}
    store = next((store for store in logins if f"Generic {store}" in text), "")
    if store and "169.254.169.254" in text:
        return f"the bucket: this shell has no login to {store}", Exit.FAILED, logins[store]
    return f"the bucket: {text}", Exit.FAILED, ""


def _fail(message: str, code: Exit, remedy: str = "") -> int:
    for line in message.splitlines() or [""]:
        print(f"error: {line}", file=sys.stderr)
    if remedy:
        print(f"  try: {remedy}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
