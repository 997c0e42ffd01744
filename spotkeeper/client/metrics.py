"""Reads a job's metrics from the bucket. A job can write anything there, so invalid files are left out and reported."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from spotkeeper.contract.metrics import BYTES, POINTS, GenerationMetrics, folder_name, object_name, read_metrics
from spotkeeper.reconcile.store.store import Store
from spotkeeper.report.job.metrics import NAMES, condensed, in_order

READS = 4  # generations that are read at once
MOST = 10_000  # generations of a job


class MetricsReader:
    """Reads the metrics of a job again and again. Generations that have ended are read once.

    Their curves are joined as they come, so the memory does not depend on the number of generations.

    Args:
        most: number of newest generations to read at first; None: all.
        metrics: how many metrics are wanted, ``loss`` first, then by name; points of others can be missing. None: all.
        points: how many points of each metric's ended generations are kept at most.
    """

    def __init__(
        self, store: Store, job: str, most: int | None = None, metrics: int | None = None, points: int = POINTS
    ) -> None:
        self._store, self._job, self._most, self._metrics, self._points = store, job, most, metrics, points
        self.names: set[str] = set()  # of all metrics, wanted or not; about NAMES at most
        self._chain: list[tuple[int, int]] = []  # ancestors (generation, step) that were read
        self._ended: GenerationMetrics | None = None  # their joined curves
        self.invalid: dict[int, str] = {}  # generation -> what is wrong with its file

    def read(self) -> tuple[GenerationMetrics, ...]:
        """Return the newest generation that has metrics, preceded by the joined points of its ancestors, if any.

        Its ancestors are the generations from whose checkpoints training resumed (``GenerationMetrics.ancestors``).
        """
        gens = self._generations()
        newest, at = None, len(gens)
        while newest is None and at:
            at -= 1
            newest = self._of(gens[at])
        if newest is None:
            return ()
        there = set(gens[:at])
        self._join([(gen, step) for gen, step in newest.ancestors if gen in there])
        return (newest,) if self._ended is None else (self._ended, newest)

    def _join(self, chain: list[tuple[int, int]]) -> None:
        """Read the ancestors of the newest generation that were not read yet."""
        begins = chain.index(self._chain[0]) if self._chain and self._chain[0] in chain else len(chain)
        known = chain[begins : begins + len(self._chain)]
        if not known or known != self._chain:  # another history: the newest generation resumed from an older checkpoint
            known, self._ended = [], None
            begins = 0 if self._most is None else max(0, len(chain) - self._most + 1)
        new = chain[begins + len(known) :]
        for at in range(0, len(new), READS):
            part = new[at : at + READS]
            with ThreadPoolExecutor(READS) as pool:
                found = [one for one in pool.map(self._of, (gen for gen, _ in part)) if one is not None]
            ended = [] if self._ended is None else [self._ended]
            upto = begins + len(known) + at + len(part)
            self._ended = self._first(condensed([*ended, *found], chain[:upto], self._points))
        self._chain = chain[begins:]

    def _generations(self) -> list[int]:
        prefix = folder_name(self._job)
        stems = [path[len(prefix) :] for path in self._store.list(prefix)]
        return sorted(int(stem) for stem in stems if stem.isascii() and stem.isdecimal() and len(stem) < 9)[-MOST:]

    def _of(self, gen: int) -> GenerationMetrics | None:
        data = self._store.part(object_name(self._job, gen), 0, BYTES + 1)
        if data is None:
            return None
        try:
            found = read_metrics(data, gen)
        except ValueError as error:
            self.invalid[gen] = str(error)
            return None
        if len(self.names) < NAMES:
            self.names |= found.metrics.keys()
        return self._first(found)

    def _first(self, found: GenerationMetrics) -> GenerationMetrics:
        """Leave out all but the first metrics. Those of the whole job are also the first of each generation."""
        if self._metrics is None:
            return found
        names = sorted(found.metrics, key=in_order)[: self._metrics]
        return replace(found, metrics={name: found.metrics[name] for name in names})
