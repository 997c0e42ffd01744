"""The documents of ``market/``: prices, networks and observations. They are advisory: no decision needs them."""

from __future__ import annotations

import logging
from typing import TypeVar

import msgspec

from spotkeeper.contract.market import MarketHour, Network, Observation, Prices
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.bucket import Bucket
from spotkeeper.reconcile.store.documents import CorruptError, Versioned, decode
from spotkeeper.reconcile.store.objects import Blob

T = TypeVar("T")

MARKET_TRIES = 5
HOURS_KEPT = 90 * 24  # of the market's history

log = logging.getLogger(__name__)


class MarketDocuments(Bucket):
    """What the function learns about spot prices, capacity and networks."""

    def read_prices(self, pools: tuple[str, ...]) -> dict[str, Versioned[Prices]]:
        """Return ``market/prices/<pool>`` by pool. Pools without prices are left out."""
        blobs = zip(pools, self._objects.get_many([paths.prices(pool) for pool in pools]), strict=True)
        return {pool: self._advisory(paths.prices(pool), blob, Prices(pool, 0.0)) for pool, blob in blobs if blob}

    def cas_prices(self, prices: Prices, token: str) -> str | None:
        """Replace a pool's prices (token ``""``: create). Returns the new token; None if another writer was first."""
        path, data = paths.prices(prices.pool), msgspec.json.encode(prices)
        return self._replace(path, data, token, own=False) if token else self._create(path, data)

    def read_networks(self) -> tuple[Network, ...]:
        return tuple(self._read_all(paths.NETWORKS, Network, deep=True))

    def put_network(self, network: Network) -> None:
        """Store a measured bandwidth in place of the older measurement."""
        self._objects.put(paths.network(network.machine_type, network.zone), msgspec.json.encode(network))

    def read_observations(self, pools: tuple[str, ...], hours: tuple[int, ...]) -> dict[str, tuple[Observation, ...]]:
        """Return the observations of these pools in these hours (since 1970), by pool, in order of time."""
        wanted = [(pool, hour) for pool in pools for hour in sorted(hours)]
        blobs = self._objects.get_many([paths.market_hour(pool, hour) for pool, hour in wanted])
        out: dict[str, tuple[Observation, ...]] = dict.fromkeys(pools, ())
        for (pool, hour), blob in zip(wanted, blobs, strict=True):
            if blob is not None:
                out[pool] += self._advisory(paths.market_hour(pool, hour), blob, MarketHour()).value.observations
        return out

    def add_observations(self, pool: str, hour: int, observations: tuple[Observation, ...]) -> bool:
        """Add observations that ``market/hours/<pool>/<hour>`` lacks. False if others wrote first at every try.

        The first writer of a new hour deletes the hours that are too old (``HOURS_KEPT``).
        """
        path = paths.market_hour(pool, hour)
        for _ in range(MARKET_TRIES):
            blob = self._objects.get(path)
            there = self._advisory(path, blob, MarketHour()).value.observations if blob else ()
            new = tuple(observation for observation in dict.fromkeys(observations) if observation not in there)
            if not new:
                return True
            merged = MarketHour(
                tuple(sorted((*there, *new), key=lambda observation: (observation.at, observation.machine)))
            )
            data = msgspec.json.encode(merged)
            done = self._replace(path, data, blob.tag) if blob else self._create(path, data)
            if done is not None:
                if blob is None:
                    self._forget_hours(pool, hour - HOURS_KEPT)
                return True
        log.warning("%s: other writers were first each time; %d observations are not stored", path, len(observations))
        return False

    def _forget_hours(self, pool: str, before: int) -> None:
        for path in self._objects.list(paths.market_hours(pool)):
            if path < paths.market_hour(pool, before):
                self._objects.delete(path)

    def _advisory(self, path: str, blob: Blob, blank: T) -> Versioned[T]:
        """Decode a document that no decision needs. If unreadable, it is quarantined and ``blank`` is returned."""
        try:
            return Versioned(decode(blob.data, type(blank), path), blob.tag)
        except CorruptError as error:
            log.warning("skipped %s", error)
            self._set_aside(path, blob)
            return Versioned(blank, blob.tag)
