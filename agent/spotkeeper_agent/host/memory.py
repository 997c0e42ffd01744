"""Keeps the agent small. ``__main__.py`` imports this module before any other.

``requests`` imports a library that guesses text encodings. The agent does not need that library, and it would take 3
MB, so this module makes its import fail. Glibc keeps the memory that imports and templates have freed, until the heap
is trimmed (:func:`trim`).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import warnings

_M_ARENA_MAX = -8

for _name in ("charset_normalizer", "chardet"):
    sys.modules.setdefault(_name, None)  # type: ignore[arg-type]  # None: the import system takes it for missing
warnings.filterwarnings("ignore", message="Unable to find acceptable character detection dependency")


def use_one_arena() -> None:
    """Make all threads share one heap: each separate heap would keep some hundred kilobytes."""
    with contextlib.suppress(AttributeError):  # a C library without mallopt
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def trim() -> None:
    """Return freed heap memory to the machine."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # a C library without malloc_trim
        ctypes.CDLL(None).malloc_trim(0)
