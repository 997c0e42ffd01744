"""The exception with which a command fails, and the exit codes."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes, the same for every command (``spotkeeper --help`` lists them)."""

    OK = 0
    FAILED = 1  # the cloud or the bucket failed; for `watch` and `submit --watch`, the job failed
    USAGE = 2  # wrong option, job file or value
    MISSING = 3  # no such stack, job, node or log
    REFUSED = 4  # conflicts with what exists


class CliError(Exception):
    """An error that ends a command without a traceback; ``remedy`` is printed on a separate line."""

    def __init__(self, message: str, code: Exit = Exit.FAILED, remedy: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.remedy = remedy
