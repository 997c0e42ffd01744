"""The mirror while a save is crashed: a process that has files of checkpoints open, as the agent has for its copies.

It reads the oldest checkpoint, which the save will drop, and the newest before it, over and
over; all it reads must be what COMMIT says, whatever the saver does to their folders.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spotkeeper.train.agent_link.control import Commit
from tests.train.forks import FORKS

_ASKED, _READY = "mirror-asked", "mirror-ready"
LIMIT_S = 60.0


@contextlib.contextmanager
def running(root: Path, disk: Path, saves: tuple[int, ...]) -> Iterator[None]:
    """Trainers wait with their last save until it has its files open.

    Raises:
        AssertionError: it read something that was never committed.
    """
    (root / _ASKED).touch()
    stop = FORKS.Event()
    process = FORKS.Process(target=_read, args=(root, disk, (saves[0], saves[-2]), stop))
    process.start()
    try:
        yield
    finally:
        stop.set()
        process.join(LIMIT_S)
        process.kill()
    assert process.exitcode == 0, (root / "mirror-log").read_text()


def await_ready(root: Path) -> None:
    end = time.monotonic() + LIMIT_S
    while (root / _ASKED).exists() and not (root / _READY).exists():
        assert time.monotonic() < end, "the mirror did not begin"
        time.sleep(0.002)


def _read(root: Path, disk: Path, steps: tuple[int, ...], stop: Any) -> None:
    os.dup2(os.open(root / "mirror-log", os.O_WRONLY | os.O_CREAT), 2)
    sources = [_source(disk, Commit(1, step)) for step in steps]
    (root / _READY).touch()
    last = False
    while not last:
        last = stop.is_set()  # once more when all is over
        for source in sources:
            for file, stream in zip(source.files, source.open, strict=True):
                stream.seek(0)
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
                assert digest == file.sha256, f"{file.name} of {source.manifest.commit} has changed under its reader"


def _source(disk: Path, commit: Commit) -> Any:
    from spotkeeper_agent.job.mirror_transfer import Source

    end = time.monotonic() + LIMIT_S
    while True:
        with contextlib.suppress(ValueError, OSError):
            return Source(disk, commit, 0, replicated=True)
        assert time.monotonic() < end, f"{commit} was never committed"
        time.sleep(0.002)
