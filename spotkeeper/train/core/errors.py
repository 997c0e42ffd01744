"""Errors in the script itself, which a restart cannot fix (exit code 93 under an agent), and lines for the job's log.

Each error is also a subclass of the built-in exception that fits it. Standard library only: the launcher's ``boot``
imports this before it knows whether the script uses the library.
"""

from __future__ import annotations

import contextlib
import sys

NO_RESTART = 93  # exit code "a restart cannot help": the job goes on hold at once, even if `retry` allows restarts


class ScriptError(Exception):
    """An error that a restart would repeat. The message says what to write instead."""


class CallError(ScriptError, RuntimeError):
    """The script omits a required call, makes a call at the wrong time, or makes a call that only the run may make."""


class AttachError(ScriptError, ValueError):
    """The arguments of ``attach()`` contradict each other or the checkpoint."""


class PartError(ScriptError, TypeError):
    """An object given to ``attach()`` has no state that can be saved."""


class DataError(ScriptError, TypeError):
    """The run cannot keep its place in this loader's data. The message says what to use instead."""


def say(text: str) -> None:
    """Print a line to the job's log. Best effort: the log may be on the disk that is full."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: stderr is closed
        # In one piece: two threads' lines must not meet.
        print(f"spotkeeper: {text}\n", end="", file=sys.stderr, flush=True)
