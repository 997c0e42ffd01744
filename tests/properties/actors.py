"""Invocations of the function that can be stopped in the middle: each runs in a greenlet and meets a hook
before and after every call it makes to the bucket or the cloud.

Nothing here is a thread: exactly one actor runs at a time, and where it stops is decided beforehand, so a
story repeats itself exactly. An actor that dies takes its finalizers along without a word to the bucket,
as a killed process would.
"""

from __future__ import annotations

import concurrent.futures
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest
from greenlet import getcurrent, greenlet


class KilledError(BaseException):
    """The platform ended this invocation; nothing catches it, and no finalizer's call gets through."""


@dataclass(frozen=True)
class Plan:
    """What befalls an invocation. Calls are counted in hooks: two a call, one before and one after.

    Attributes:
        freeze_at: the hook at which it stops, or 0.
        thaw_after: steps of the machine until it goes on by itself.
        die_at: the hook at which it is killed, or 0.
        freeze_on: or how the hook's name begins; the first such.
    """

    freeze_at: int = 0
    thaw_after: int = 0
    die_at: int = 0
    freeze_on: str = "\0"


UNDISTURBED = Plan()
MAKES = "POST /compute/v1/projects/local/zones/"  # how the hook before a machine, disk or attachment begins


@dataclass
class Actor:
    """One invocation: of a tick, a round, an agent's sync or an event."""

    name: str
    work: Callable[[], Any]
    plan: Plan = UNDISTURBED
    hooks: int = 0
    frozen: bool = False
    was_frozen: bool = False
    dead: bool = False
    left: int = 0
    at: str = ""
    _let: greenlet | None = field(default=None, repr=False)

    def go(self) -> bool:
        """Run until it ends or freezes; whether it ended."""
        if self._let is None:
            self._let = _Let(self)
        self.frozen = False
        self._let.switch()
        return self._let.dead

    def kill(self) -> None:
        self.dead = True
        if self._let is not None and not self._let.dead:
            self.frozen = False
            self._let.throw(KilledError)

    def hook(self, at: str) -> None:
        if self.dead:
            raise KilledError(at)
        self.hooks += 1
        self.at = at
        if self.hooks == self.plan.die_at:
            self.dead = True
            raise KilledError(at)
        if self.hooks == self.plan.freeze_at or (at.startswith(self.plan.freeze_on) and not self.was_frozen):
            self.frozen = self.was_frozen = True
            self.left = self.plan.thaw_after
            getcurrent().parent.switch()


class _Let(greenlet):
    """A greenlet that knows its actor, so that a hook finds whose call it is."""

    def __init__(self, actor: Actor) -> None:
        super().__init__(self._work)
        self.actor = actor

    def _work(self) -> None:
        try:
            self.actor.work()
        except KilledError:
            self.actor.dead = True


def current() -> Actor | None:
    """Whose call this is; None: nobody's that could be stopped (an inline invocation, or a look of the test)."""
    here = getcurrent()
    return here.actor if isinstance(here, _Let) else None


def hook(at: str) -> None:
    actor = current()
    if actor is not None:
        actor.hook(at)


class Inline:
    """A ``ThreadPoolExecutor`` that works at once, in order, in the caller's greenlet."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args))
        except Exception as error:  # not a killed greenlet's
            done.set_exception(error)
        return done

    def map(self, work: Callable[..., Any], *rows: Iterable[Any]) -> Iterator[Any]:
        return iter([work(*row) for row in zip(*rows, strict=False)])


def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every thread pool of the function run its work in order, also in modules that have imported it already."""
    for name, module in list(sys.modules.items()):
        if name.startswith("spotkeeper.reconcile") and hasattr(module, "ThreadPoolExecutor"):
            monkeypatch.setattr(module, "ThreadPoolExecutor", Inline)
    monkeypatch.setattr(concurrent.futures, "ThreadPoolExecutor", Inline)
