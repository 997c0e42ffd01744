"""Parts of a script that may take long: while one of a machine's processes is in such a part, nothing hangs there.

A process says so by a file in the run folder, for the agent to see. Standard library only: the agent imports this too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

NAME = "untimed"


@contextlib.contextmanager
def section(run: Path | None, local_rank: int) -> Iterator[None]:
    """For as long as the block runs. A block within a block changes nothing. ``run`` None: nobody watches."""
    if run is None:
        yield
        return
    file = run / f"{NAME}.{local_rank}"
    try:
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    except OSError:  # we are in one already; or the folder takes nothing, and no job fails for that
        yield
        return
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def sections(run: Path) -> bool:
    """Whether any process of this machine is in such a part."""
    with contextlib.suppress(OSError):
        return any(name.startswith(NAME + ".") for name in os.listdir(run))  # noqa: PTH208 - looked at often
    return False
