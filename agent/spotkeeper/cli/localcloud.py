"""The one-machine cloud as the command line reaches it: through its folder."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from msgspec import Struct

from spotkeeper.cli.errors import CliError, Exit
from spotkeeper.cli.target import CLOUD_FILE, Target
from spotkeeper.clock import ENV as CLOCK_ENV
from spotkeeper.clock import Clock


class _CloudFile(Struct, frozen=True):
    """The part of ``cloud.json`` that is needed before the cloud's own code is loaded."""

    port: int
    clock: str


def local_target(folder: Path) -> Target:
    """The stack of the one-machine cloud in ``folder``.

    Raises:
        CliError: its ``cloud.json`` cannot be read.
    """
    path = folder / CLOUD_FILE
    try:
        cloud = msgspec.json.decode(path.read_bytes(), type=_CloudFile)
        os.environ[CLOCK_ENV] = cloud.clock  # also for whatever this command starts
        clock = Clock.from_env()
    except (OSError, msgspec.DecodeError, ValueError) as error:
        raise CliError(f"{path}: {error}", Exit.FAILED, "spotkeeper local down, then up again") from None
    endpoint = f"http://127.0.0.1:{cloud.port}/compute/v1"
    return Target("local", f"sqlite://{folder.resolve()}/bucket.sqlite", clock, folder, compute_endpoint=endpoint)
