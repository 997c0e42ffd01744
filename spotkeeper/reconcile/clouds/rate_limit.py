"""Rate limits for calls that change the cloud: calls wait instead of exceeding the cloud's quota.

Google allows 1,500 changes per minute and project. EC2 allows 5 launches at once and then 2 per second, and 50 other
changes at once and then 5 per second. Requesting a thousand machines at once would be refused half-way, and would
block other users of the project. A call that would wait too long is postponed to the next round, which repeats it with
the same idempotency key.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from spotkeeper.contract.cloud import Action, Cloud, InsertVm, Listing, Result, ResultKind, chances_of
from spotkeeper.contract.market import Chances, PriceRun

PER_S = 15.0  # 900 per minute, which leaves room for a second process and for users
BURST = 100.0
EC2_PER_S, EC2_BURST = 5.0, 50.0  # EC2's limits for each kind of change, per account and region
EC2_LAUNCHES_PER_S, EC2_LAUNCHES = 2.0, 5.0


class TokenBucket:
    """A token bucket: ``burst`` tokens at once, then ``per_s`` a second. Thread-safe; the caller does the waiting."""

    def __init__(self, per_s: float = PER_S, burst: float = BURST, now: Callable[[], float] = time.monotonic) -> None:
        self._per_s, self._burst, self._now = per_s, burst, now
        self._lock = threading.Lock()
        self._free_at = now() - burst / per_s  # when the next token would arrive if none were saved

    def take(self, patience_s: float) -> float | None:
        """Take a token and return the seconds to wait for it; if above ``patience_s``, take none and return None."""
        with self._lock:
            now = self._now()
            at = max(self._free_at, now - self._burst / self._per_s) + 1.0 / self._per_s
            if at - now > patience_s:
                return None
            self._free_at = at
            return max(0.0, at - now)


class Paced:
    """A cloud with rate-limited changes. Listings are not limited, as they are few and have a separate quota.

    Args:
        launches: a separate bucket for launches, if the cloud limits them separately.
    """

    def __init__(
        self,
        cloud: Cloud,
        bucket: TokenBucket,
        sleep: Callable[[float], None] = time.sleep,
        launches: TokenBucket | None = None,
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
        """Wait, then perform the action; THROTTLED without a call if the wait exceeds half of ``deadline_s``."""
        bucket = self._launches if isinstance(action, InsertVm) else self._bucket
        wait_s = bucket.take(deadline_s / 2)
        if wait_s is None:
            return Result(action, ResultKind.THROTTLED, "postponed: the cloud's quota of calls is used up for now")
        if wait_s:
            self._sleep(wait_s)
        return self.cloud.perform(action, deadline_s - wait_s)
