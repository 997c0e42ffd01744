"""What a run cost and how long it stood still: sums over virtual time, and one row for every recovery."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from spotkeeper.vm.sync import pending_s

from tests.sim.engine import Engine

# List prices, USD: Cloud Storage (regional, classes A and B); Cloud Run: a request, and a second of one vCPU with
# half a GiB. A round holds that for a second; other requests take 20 ms and share it with seven.
WRITE_USD, READ_USD = 5e-6, 4e-7
REQUEST_USD, SECOND_USD = 4e-7, 2.4e-5 + 0.5 * 2.5e-6
ROUND_S, OTHER_S = 1.0, 0.02 / 8


@dataclass(frozen=True)
class Recovery:
    """From the first sign of trouble until all train again.

    ``dry``: the cloud refused something meanwhile, or standing still was asked for (or nobody answered).
    ``awaited``: a machine was launched while the gang stood still.
    """

    how: str
    ranks: int
    stood_s: float
    wasted_min: float  # machine-minutes billed without training since the recovery before
    rounds: int
    writes: int
    cents: float
    dry: bool
    awaited: bool


class Meter:
    """Integrals of machines and of training ones; ``counts`` is the function's."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.recoveries: list[Recovery] = []
        self.dry = self.launched = False
        self.excused_until = 0.0  # somebody asked for a pause, or the function answers nobody
        self.counts: dict[str, int] = {}
        self.billed_s = self.useful_s = 0.0
        self._machines = 0
        self._training: dict[str, int] = {}
        self._at = engine.t
        self._since: dict[str, tuple[float, str, dict[str, int]]] = {}
        self._wasted = 0.0

    def machines(self, by: int) -> None:
        self._integrate()
        self._machines += by

    def useful(self) -> float:
        """Machine-seconds of training so far."""
        self._integrate()
        return self.useful_s

    def _integrate(self) -> None:
        passed, self._at = self.engine.t - self._at, self.engine.t
        self.billed_s += passed * self._machines
        self.useful_s += passed * sum(self._training.values())

    def sign(self, job: str) -> None:
        """Trouble is on its way: what is done from now on is for the recovery."""
        if job not in self._since and self._training.get(job):
            self._since[job] = (float("nan"), "", dict(self.counts))

    def stands(self, job: str, how: str) -> None:
        self._integrate()
        if not self._training.pop(job, 0):
            return
        before = self._since.get(job)
        self._since[job] = (self.engine.t, how, before[2] if before else dict(self.counts))
        self.dry = self.launched = False

    def trains(self, job: str, ranks: int) -> None:
        self._integrate()
        self._training[job] = ranks
        began = self._since.pop(job, None)
        wasted = self.billed_s - self.useful_s
        if began is not None and began[1]:
            self.recoveries.append(self._row(ranks, began, wasted - self._wasted))
        self._wasted = wasted

    def _row(self, ranks: int, began: tuple[float, str, dict[str, int]], wasted_s: float) -> Recovery:
        stood_from, how, counts = began
        grown = {verb: self.counts[verb] - counts.get(verb, 0) for verb in self.counts}
        writes = sum(grown.get(verb, 0) for verb in BUCKET_WRITES)
        reads = sum(number for verb, number in grown.items() if verb.startswith("read_") or verb == "draining")
        lists = sum(number for verb, number in grown.items() if verb.startswith("list_"))
        polls = ranks * polls_in(int(self.engine.t - stood_from))
        asked = grown.get("request", 0) + polls
        usd = (writes + lists) * WRITE_USD + (reads + polls) * READ_USD
        usd += asked * (REQUEST_USD + OTHER_S * SECOND_USD) + grown.get("list", 0) * ROUND_S * SECOND_USD
        return Recovery(
            how=how,
            ranks=ranks,
            stood_s=self.engine.t - stood_from,
            wasted_min=wasted_s / 60,
            rounds=grown.get("list", 0),
            writes=writes,
            cents=usd * 100,
            dry=self.dry or stood_from < self.excused_until,
            awaited=self.launched,
        )


BUCKET_WRITES = (
    "add_sights",
    "append_ledger",
    "cas_alloc",
    "cas_prices",
    "cas_record",
    "drop_lease",
    "put_fact",
    "put_progress",
    "put_tomb",
    "take_lease",
)


@cache
def polls_in(seconds: int) -> int:
    """Of one machine that waits so long: those that find nothing new are not simulated, but paid."""
    count, at = 0, 0.0
    while at < seconds:
        at += pending_s(at)
        count += 1
    return count
