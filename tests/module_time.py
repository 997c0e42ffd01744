"""Gives modules a ``time`` of their own.

The module :mod:`time` itself is shared by all threads of the process, so a function replaced there also answers the
threads that other tests have left: a count of its calls counts theirs, and a clock that stands still stops them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest


def replace_time(
    monkeypatch: pytest.MonkeyPatch, *modules: ModuleType, **functions: Callable[..., float | None]
) -> None:
    """Replace functions of ``time`` by name, for the code of these modules alone."""
    for module in modules:
        monkeypatch.setattr(module, "time", SimpleNamespace(**vars(time) | vars(module.time) | functions))
