"""What is wrong with the script itself: no restart mends it, so under the agent its process ends with 93.

Each error also is the built-in one that it would be without the agent. Standard library only: the
launcher's ``boot`` asks for these before it knows whether the script uses the library at all.
"""

from __future__ import annotations

NO_RESTART = 93  # the job's word for "a restart cannot help": it holds at once, whatever `retry` allows


class ScriptError(Exception):
    """The same script fails again at the same place; the message says what to write instead."""


class CallError(ScriptError, RuntimeError):
    """A call of the run's that is missing, out of turn, or the script's own where the run's belongs."""


class AttachError(ScriptError, ValueError):
    """What was given to ``attach()`` cannot be had together."""


class PartError(ScriptError, TypeError):
    """What was given to ``attach()`` is not what it must be."""


class DataError(ScriptError, TypeError):
    """A loader whose position cannot be kept; the message says what to give instead."""
