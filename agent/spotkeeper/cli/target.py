"""Which stack a command speaks to: the cloud one that the environment names, or the local one.

In this order: ``--stack`` with ``SPOTKEEPER_BUCKET``; ``SPOTKEEPER_STACK`` with
``SPOTKEEPER_BUCKET``; the one-machine cloud in ``SPOTKEEPER_FOLDER``; the one whose folder
``.spotkeeper/local`` is here or in a folder above.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spotkeeper.cli.errors import CliError, Exit
from spotkeeper.clock import Clock

if TYPE_CHECKING:
    from spotkeeper.reconcile.store_api import Store
    from spotkeeper.report.view import Site
    from spotkeeper.spec.stack import StackState

LOCAL = Path(".spotkeeper") / "local"
SCALE = 20.0  # how many times faster its clock runs, where nobody says otherwise
CLOUD_FILE = "cloud.json"
FOLDER = "SPOTKEEPER_FOLDER"


@dataclass(frozen=True)
class Target:
    """A stack: its bucket, its clock, and the folder of the one-machine cloud where it is that."""

    stack: str
    bucket: str
    clock: Clock
    local: Path | None = None
    function_url: str = ""
    compute_endpoint: str = ""  # root of the Compute API, where it is not the cloud's own

    def site(self) -> Site:
        from spotkeeper.report.view import Site

        return Site(self.clock.scale, self.local is not None)

    def up(self) -> str:
        """The command that brings the stack up."""
        return "pulumi up" if self.local is None else f"spotkeeper local up {folder_option(self.local)}"

    def store(self) -> Store:
        """The bucket.

        Raises:
            CliError: the address is none.
        """
        from spotkeeper.reconcile.store import open_store

        try:
            return open_store(self.bucket)
        except ValueError as error:
            raise CliError(str(error), Exit.USAGE) from None

    def state(self, store: Store) -> StackState:
        """``stack/pools.json``.

        Raises:
            CliError: the stack was never brought up, or is another one.
        """
        state = store.read_stack()
        if state is None:
            raise CliError(
                f"{self.bucket} holds no stack (no stack/pools.json)", Exit.MISSING, f"bring it up: {self.up()}"
            )
        if self.stack and state.stack != self.stack:
            raise CliError(
                f"{self.bucket} belongs to the stack {state.stack}, not to {self.stack}",
                Exit.MISSING,
                export_bucket(self.stack),
            )
        return state


def find_target(stack: str | None, start: Path | None = None) -> Target:
    """The stack that ``--stack``, the environment or the working folder name.

    Raises:
        CliError: none does.
    """
    name = stack or os.environ.get("SPOTKEEPER_STACK", "")
    bucket = os.environ.get("SPOTKEEPER_BUCKET", "")
    folder = named_folder() or local_folder(start or Path.cwd())
    if bucket and name:
        return Target(name, bucket, _clock(), function_url=os.environ.get("SPOTKEEPER_FUNCTION", ""))
    if bucket:
        raise CliError(
            "SPOTKEEPER_BUCKET is set, but no stack is named",
            Exit.USAGE,
            "export SPOTKEEPER_STACK=...; or, for the cloud on this machine, unset SPOTKEEPER_BUCKET",
        )
    if folder is not None and name in ("", "local"):
        from spotkeeper.cli.localcloud import local_target

        return local_target(folder)
    if name:
        here = f", and the cloud in {folder} is the stack local" if folder is not None else ""
        raise CliError(
            f"no stack {name}: SPOTKEEPER_BUCKET is not set{here}",
            Exit.MISSING,
            export_bucket(name),
        )
    raise CliError(
        "no stack: SPOTKEEPER_STACK and SPOTKEEPER_BUCKET are not set, and no .spotkeeper/local is here or above",
        Exit.MISSING,
        "on this machine: spotkeeper local up, or where one runs in another folder: export SPOTKEEPER_FOLDER=..."
        "/.spotkeeper/local; in a cloud: export SPOTKEEPER_STACK=... SPOTKEEPER_BUCKET=gs://...",
    )


def export_bucket(stack: str) -> str:
    """The command that names a stack's bucket: its output `bucket` is the bare name."""
    return f"export SPOTKEEPER_BUCKET=gs://$(pulumi stack output bucket --stack {shlex.quote(stack)})  # s3:// on AWS"


def folder_option(folder: Path) -> str:
    """How the commands of a one-machine cloud name it, for a shell."""
    return f"--folder {shlex.quote(str(folder))}"


def named_folder() -> Path | None:
    """The one-machine cloud's folder that ``SPOTKEEPER_FOLDER`` names."""
    named = os.environ.get(FOLDER, "")
    return Path(named) if named else None


def local_folder(start: Path) -> Path | None:
    """The one-machine cloud's folder here or above, if it was ever started."""
    for folder in (start, *start.parents):
        if (folder / LOCAL / CLOUD_FILE).is_file():
            return folder / LOCAL
    return None


def _clock() -> Clock:
    try:
        return Clock.from_env()
    except ValueError as error:
        raise CliError(str(error), Exit.USAGE) from None
