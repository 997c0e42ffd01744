"""Giving memory back to the machine: what imports and templates left free inside the C library's heap."""

from __future__ import annotations

import contextlib
import ctypes
import gc

_M_ARENA_MAX = -8


def frugal() -> None:
    """One heap for all threads; each heap of its own would hold on to some hundred kilobytes."""
    with contextlib.suppress(AttributeError):  # a C library without mallopt
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def give_back() -> None:
    gc.collect()
    with contextlib.suppress(AttributeError):  # a C library without malloc_trim
        ctypes.CDLL(None).malloc_trim(0)
