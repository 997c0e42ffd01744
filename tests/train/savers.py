"""A node's saver, as its agent starts it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from spotkeeper.train.checkpoint import saver
from spotkeeper.train.checkpoint.client import Client
from spotkeeper.train.checkpoint.protocol import SaverError


def start_saver(path: Path) -> subprocess.Popen[bytes]:
    """Start a node's saver at ``path`` and return once it answers.

    Raises:
        SaverError: it did not answer within five seconds.
    """
    process = subprocess.Popen(saver.command(path), start_new_session=True)
    try:
        Client.connect(path).close()
    except SaverError:
        process.kill()
        process.wait()
        raise
    return process
