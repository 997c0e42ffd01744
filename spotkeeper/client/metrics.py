"""Reads a job's metrics from the bucket. A job can write anything there, so invalid files are left out and reported."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from spotkeeper.contract.metrics import BYTES, GenerationMetrics, folder_name, object_name, read_metrics
from spotkeeper.reconcile.store.store import Store

READS = 8  # generations that are read at once
MOST = 10_000  # generations of a job


class MetricsReader:
    """Reads the metrics of a job again and again. Generations that have ended are read once.

    Args:
        most: number of newest generations to read; None: all.
    """

    def __init__(self, store: Store, job: str, most: int | None = None) -> None:
        self._store, self._job, self._most = store, job, most
        self._ended: dict[int, GenerationMetrics | None] = {}
        self.invalid: dict[int, str] = {}  # generation -> what is wrong with its file

    def read(self) -> tuple[GenerationMetrics, ...]:
        """Return the newest generation that has metrics and its ancestors, oldest first."""
        gens = self._generations()
        newest, at = None, len(gens)
        while newest is None and at:
            at -= 1
            newest = self._of(gens[at])
        if newest is None:
            return ()
        there = set(gens[:at])
        wanted = [gen for gen, _ in newest.ancestors if gen in there]
        wanted = wanted if self._most is None else wanted[len(wanted) - min(len(wanted), self._most - 1) :]
        self._read([gen for gen in wanted if gen not in self._ended])
        return (*(found for gen in wanted if (found := self._ended[gen]) is not None), newest)

    def _read(self, gens: Iterable[int]) -> None:
        with ThreadPoolExecutor(READS) as pool:
            for gen, found in zip(gens, pool.map(self._of, gens), strict=True):
                self._ended[gen] = found

    def _generations(self) -> list[int]:
        prefix = folder_name(self._job)
        stems = [path[len(prefix) :] for path in self._store.list(prefix)]
        return sorted(int(stem) for stem in stems if stem.isascii() and stem.isdecimal() and len(stem) < 9)[-MOST:]

    def _of(self, gen: int) -> GenerationMetrics | None:
        data = self._store.part(object_name(self._job, gen), 0, BYTES + 1)
        if data is None:
            return None
        try:
            return read_metrics(data, gen)
        except ValueError as error:
            self.invalid[gen] = str(error)
            return None
