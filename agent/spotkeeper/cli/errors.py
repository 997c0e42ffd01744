"""How the command line fails: one exception that says what to do, and the exit codes."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes, the same for every command (``spotkeeper --help`` lists them)."""

    OK = 0
    FAILED = 1  # the cloud or the bucket did not do it; `watch` and `submit --watch`: the job failed
    USAGE = 2  # a wrong option, job file or value: change it
    MISSING = 3  # no such stack, job, rank, log
    REFUSED = 4  # it would clash with what is there


class CliError(Exception):
    """Ends a command: printed without a traceback, ``remedy`` on a line of its own."""

    def __init__(self, message: str, code: Exit = Exit.FAILED, remedy: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.remedy = remedy
