"""A job's lease, so that one round runs at a time. It only saves money; safety depends neither on it nor on a clock.

The lease is short, and a thread renews it while the round runs. So the lease of a dead round expires within seconds,
and reports that were left to that round do not have to wait for the next tick.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from uuid import uuid4

from spotkeeper.clock import Now
from spotkeeper.reconcile.controller.adoption import adopt
from spotkeeper.reconcile.store.documents import CorruptError
from spotkeeper.reconcile.store.objects import StoreError
from spotkeeper.reconcile.store.store import Store

WHOLE_S = 75.0  # length of a lease that is not renewed: the function's timeout and 15 s
SHORT_S = 4.0  # length of a lease that is renewed every BEAT_S
BEAT_S = 1.5  # Google allows one write per second to an object
TROUBLE_S = 2.0  # virtual; delay of the next round after a round that the bucket interrupted

Every = Callable[[float, Callable[[], object]], Callable[[], None]]  # (seconds, work) -> a function that ends the work

log = logging.getLogger("spotkeeper.reconcile")


class Lease:
    """One round's lease of one job. ``due``: when the next round is due; written when the lease is released."""

    def __init__(self, store: Store, job: str, clock: Now, every: Every | None) -> None:
        self.store, self.job, self.clock, self.every = store, job, clock, every
        self.nonce = uuid4().hex
        self.due: float | None = None
        self.absent = False  # whether the job has no record, and so gets no lease
        real = WHOLE_S if every is None else SHORT_S
        self.ttl_s = real + 10.0 * (clock.scale - 1.0)  # virtual; on a scaled clock a round still takes real seconds

    def take(self) -> bool:
        return self.store.take_lease(self.job, self.nonce, self.clock.now(), self.ttl_s, self._adopt)

    def _adopt(self) -> bool:
        self.absent = not adopt(self.store, self.job, self.clock.now())
        return not self.absent

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """Renew the lease during the ``with`` block, then release it."""
        stop = self.every(BEAT_S, self.take) if self.every is not None else _nothing
        try:
            yield
        except CorruptError:  # an alarm was logged, and a person must act: no round is due soon
            raise
        except StoreError:
            self.due = self.clock.now() + TROUBLE_S  # requests that left their reports to this round rely on the next
            raise
        finally:
            stop()
            self._give_back()

    def _give_back(self) -> None:
        """Release the lease. If that fails, the round's work stays valid and the lease expires."""
        try:
            self.store.drop_lease(self.job, self.nonce, self.due)
        except StoreError as error:
            log.warning("the lease was not released: %s", error)


def in_thread(seconds: float, work: Callable[[], object]) -> Callable[[], None]:
    """Call ``work`` in a thread, every ``seconds`` (real time). The returned function ends the thread."""
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
