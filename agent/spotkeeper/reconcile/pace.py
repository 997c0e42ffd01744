"""Calls that change something in the cloud, no faster than its quota: by waiting, not by being refused.

Google allows 1,500 mutations a minute and project, EC2 five launches at once and two a second, and of other changes
fifty and five: a gang of a thousand asked for at once would meet the refusal in the middle, and so would everybody
else in the project. What there is no time left for is put off to the next round, which repeats it under the same key.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from spotkeeper.spec.cloud import Action, Class, Cloud, InsertVm, Listing, Result, chances_of
from spotkeeper.spec.market import Chances, PriceRun

PER_S = 15.0  # 900 a minute: room for a second process, and for people
BURST = 100.0
EC2_PER_S, EC2_BURST = 5.0, 50.0  # of each kind of change, in an account and region
EC2_LAUNCHES_PER_S, EC2_LAUNCHES = 2.0, 5.0


class Bucket:
    """Tokens: ``burst`` at once, then ``per_s``. Thread-safe; its users wait their turn outside of the lock."""

    def __init__(self, per_s: float = PER_S, burst: float = BURST, now: Callable[[], float] = time.monotonic) -> None:
        self._per_s, self._burst, self._now = per_s, burst, now
        self._lock = threading.Lock()
        self._free_at = now() - burst / per_s  # when the next token would be there, were none saved

    def take(self, patience_s: float) -> float | None:
        """How long to wait for the token that is now the caller's, or None where that is longer than it can wait."""
        with self._lock:
            now = self._now()
            at = max(self._free_at, now - self._burst / self._per_s) + 1.0 / self._per_s
            if at - now > patience_s:
                return None
            self._free_at = at
            return max(0.0, at - now)


class Paced:
    """A cloud whose changes are paced. Listings are not: they have a quota of their own, and there are few.

    Args:
        launches: a bucket of their own for machines, where the cloud has one.
    """

    def __init__(
        self,
        cloud: Cloud,
        bucket: Bucket,
        sleep: Callable[[float], None] = time.sleep,
        launches: Bucket | None = None,
    ) -> None:
        self.cloud, self._bucket, self._sleep = cloud, bucket, sleep
        self._launches = launches or bucket

    def list(self, stack: str) -> Listing:
        return self.cloud.list(stack)

    def price_history(self, pool: str, deadline_s: float) -> tuple[PriceRun, ...] | None:
        return self.cloud.price_history(pool, deadline_s)

    def chances(self, pool: str, deadline_s: float) -> Chances | None:
        return chances_of(self.cloud, pool, deadline_s)

    def perform(self, action: Action, deadline_s: float) -> Result:
        """As the cloud's; THROTTLED, without a call, where its turn would come later than half of its time."""
        bucket = self._launches if isinstance(action, InsertVm) else self._bucket
        wait_s = bucket.take(deadline_s / 2)
        if wait_s is None:
            return Result(action, Class.THROTTLED, "put off: the cloud's quota of calls")
        if wait_s:
            self._sleep(wait_s)
        return self.cloud.perform(action, deadline_s - wait_s)
