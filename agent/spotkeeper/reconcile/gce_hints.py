"""Asking Compute Engine what it says of its spot machines: prices, and how its zones stand. Never raises.

Whatever is not answered in time, refused (403, 404, 429), or makes no sense is unknown. ``market.py`` keeps what was
told, and sees to it that nothing is asked for again within the hour.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor

from spotkeeper.clock import Clock
from spotkeeper.reconcile import gce_advice
from spotkeeper.reconcile.gce_api import Api
from spotkeeper.reconcile.gce_errors import parse_error
from spotkeeper.reconcile.wire import NoAnswerError
from spotkeeper.spec.market import Chances, Guess, PriceRun
from spotkeeper.spec.stack import PoolState, StackState

AT_ONCE = 4  # questions of one pool

log = logging.getLogger(__name__)


class Hints:
    """The advice of one stack's cloud. Thread-safe."""

    def __init__(self, stack: StackState, api: Api, clock: Clock) -> None:
        self._stack, self._api, self._clock = stack, api, clock
        self._path = f"projects/{stack.project}/regions/{stack.region}/advice"

    def prices(self, pool: str, deadline_s: float) -> tuple[PriceRun, ...] | None:
        """Spot prices of the pool's machine type in the stack's region; None where the cloud does not tell them."""
        found = self._pool(pool)
        if found is None:
            return None
        question = gce_advice.question(found.machine_type)
        body = self._ask("capacityHistory", question, time.monotonic() + deadline_s, f"prices of pool {pool}")
        return None if body is None else gce_advice.price_runs(body)

    def chances(self, pool: str, deadline_s: float) -> Chances | None:
        """Zone by zone, for a score is of all zones that a question names; None where it says nothing of any."""
        found, ends = self._pool(pool), time.monotonic() + deadline_s
        if found is None:
            return None
        with ThreadPoolExecutor(min(AT_ONCE, 2 * len(found.zones))) as threads:
            now = [threads.submit(self._capacity, found, zone, ends) for zone in found.zones]
            before = [threads.submit(self._preemptions, found, zone, ends) for zone in found.zones]
        told = (gce_advice.together(one.result(), two.result()) for one, two in zip(now, before, strict=True))
        by_zone = {zone: guess for zone, guess in zip(found.zones, told, strict=True) if guess is not None}
        return Chances(self._clock.now(), by_zone) if by_zone else None

    def _capacity(self, pool: PoolState, zone: str, ends: float) -> Guess | None:
        body = self._ask("capacity", gce_advice.capacity_question(pool, zone), ends, f"pool {pool.name} in {zone}")
        return None if body is None else gce_advice.obtainable(body, zone)

    def _preemptions(self, pool: PoolState, zone: str, ends: float) -> Guess | None:
        question = gce_advice.preemptions_question(pool.machine_type, zone)
        body = self._ask("capacityHistory", question, ends, f"preemptions of pool {pool.name} in {zone}")
        return None if body is None else gce_advice.kept(body)

    def _pool(self, pool: str) -> PoolState | None:
        found = self._stack.pool(pool)
        return found if found is not None and gce_advice.supported(found.machine_type) else None

    def _ask(self, method: str, question: dict[str, object], ends: float, what: str) -> bytes | None:
        left = ends - time.monotonic()
        if left <= 0:
            return None
        try:
            answer = self._api.call("POST", f"{self._path}/{method}", left, {}, question)
        except NoAnswerError as error:
            log.info("%s: %s", what, error)
            return None
        if answer.status != 200:
            log.info("%s: %s", what, parse_error(answer.status, answer.body)[1])
            return None
        return answer.body
