"""How much of a long test runs: what kills the mutants of its area in ``make test``, all of it in the target for it."""

from __future__ import annotations

import os
from typing import TypeVar

WHOLE = bool(os.environ.get("SPOTKEEPER_TESTS_WHOLE"))
T = TypeVar("T")


def size(few: T, whole: T) -> T:
    """``few`` in ``make test``; ``whole`` where ``SPOTKEEPER_TESTS_WHOLE`` is set (make burst, recovery, ...)."""
    return whole if WHOLE else few
