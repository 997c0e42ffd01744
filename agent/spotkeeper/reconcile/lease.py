"""A job's lease: one round at a time, to save money. No safety property rests on it, nor on its clock.

With a beat it is short and renewed while the round runs, so that a holder whose process ends is missed within
seconds: reports that went away because the lease was taken would otherwise wait for the next tick.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol
from uuid import uuid4

from spotkeeper.reconcile.store_api import CorruptError, Store, StoreError

WHOLE_S = 75.0  # without a beat: the function's timeout and 15 s
SHORT_S = 4.0  # with one
BEAT_S = 1.5  # Google takes one write a second to an object
TROUBLE_S = 2.0  # virtual; after a round that the bucket interrupted, the next is due

Every = Callable[[float, Callable[[], object]], Callable[[], None]]  # (seconds, work) -> what ends it

log = logging.getLogger("spotkeeper.reconcile")


class Now(Protocol):
    @property
    def scale(self) -> float: ...

    def now(self) -> float: ...


class Lease:
    """One holder's hold of one job. ``due``: what the next reader is told when it is given back."""

    def __init__(self, store: Store, job: str, clock: Now, every: Every | None) -> None:
        self.store, self.job, self.clock, self.every = store, job, clock, every
        self.nonce = uuid4().hex
        self.due: float | None = None
        real = WHOLE_S if every is None else SHORT_S
        self.ttl_s = real + 10.0 * (clock.scale - 1.0)  # virtual; on a scaled clock a round still takes real seconds

    def take(self) -> bool:
        return self.store.take_lease(self.job, self.nonce, self.clock.now(), self.ttl_s)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Renewed until the end; given back whatever happens, but by a process that ends."""
        stop = self.every(BEAT_S, self.take) if self.every is not None else _nothing
        try:
            yield
        except CorruptError:  # it is told, and waits for a person: nobody need hurry
            raise
        except StoreError:
            self.due = self.clock.now() + TROUBLE_S  # who went away because of this round counted on it
            raise
        finally:
            stop()
            self._give_back()

    def _give_back(self) -> None:
        """What the round did stands; a lease that stays where it is ends by itself."""
        try:
            self.store.drop_lease(self.job, self.nonce, self.due)
        except StoreError as error:
            log.warning("the lease was not given back: %s", error)


def in_thread(seconds: float, work: Callable[[], object]) -> Callable[[], None]:
    """``work`` every so many real seconds, until the returned function is called (and it has ended)."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(seconds):
            try:
                work()
            except StoreError as error:
                log.warning("the lease was not renewed: %s", error)

    thread = threading.Thread(target=beat, name="lease", daemon=True)
    thread.start()

    def stop() -> None:
        ended.set()
        thread.join()

    return stop


def _nothing() -> None:
    return
