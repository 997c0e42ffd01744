"""What a run cost and how long it stood still: sums over virtual time, and one row for every recovery."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from spotkeeper.reconcile.service.rounds import AGE_S
from spotkeeper_agent.core.sync import LONGEST_S, PATIENCE, pending_s
from tests.sim.engine import Engine
from tests.sim.function import PROCESSES

# List prices, USD: Cloud Storage (regional, classes A and B); Cloud Run: a request, and a second of one vCPU with
# half a GiB. A round holds that for a second; other requests take 20 ms and share it with seven.
WRITE_USD, READ_USD = 5e-6, 4e-7
REQUEST_USD, SECOND_USD = 4e-7, 2.4e-5 + 0.5 * 2.5e-6
ROUND_S, OTHER_S = 1.0, 0.02 / 8
SIGN_S = 600.0  # from a sign of trouble to the stop that it announces: a notice, and the boot of a successor


@dataclass(frozen=True)
class Recovery:
    """From the first sign of trouble until all train again.

    ``dry``: the cloud refused something meanwhile, or standing still was asked for (or nobody answered).
    ``awaited``: a machine was launched while the gang stood still.
    """

    how: str
    nodes: int
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
        self.settle: Callable[[str], None] = lambda _: None  # brings ``counts`` up to date
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
        if self._training.get(job) and self._sign(job) is None:
            self.settle(job)
            self._since[job] = (self.engine.t, "", dict(self.counts))

    def _sign(self, job: str) -> dict[str, int] | None:
        """The counts at the sign of trouble; None where there was none, or it came to nothing (a reprieve)."""
        at, _, counts = self._since.get(job, (float("-inf"), "", {}))
        return counts if self.engine.t - at <= SIGN_S else None

    def stands(self, job: str, how: str) -> None:
        self._integrate()
        if not self._training.pop(job, 0):
            return
        self.settle(job)
        self._since[job] = (self.engine.t, how, self._sign(job) or dict(self.counts))
        self.dry = self.launched = False

    def trains(self, job: str, nodes: int) -> None:
        self._integrate()
        self._training[job] = nodes
        began = self._since.pop(job, None)
        wasted = self.billed_s - self.useful_s
        if began is not None and began[1]:
            self.settle(job)
            self.recoveries.append(self._row(nodes, began, wasted - self._wasted))
        self._wasted = wasted

    def _row(self, nodes: int, began: tuple[float, str, dict[str, int]], wasted_s: float) -> Recovery:
        stood_from, how, counts = began
        grown = {verb: self.counts[verb] - counts.get(verb, 0) for verb in self.counts}
        writes = sum(grown.get(verb, 0) for verb in BUCKET_WRITES)
        reads = sum(number for verb, number in grown.items() if verb.startswith("read_"))
        reads += sum(objects * grown.get(verb, 0) for verb, objects in READS.items())
        lists = sum(grown.get(verb, 0) for verb in LISTS)
        polls = max(0, grown.get(POLL, 0))
        reads += reads_of(polls, self.engine.t - stood_from)
        asked = grown.get("request", 0) + polls
        usd = (writes + lists) * WRITE_USD + reads * READ_USD
        usd += grown.get("waited_s", 0) * SECOND_USD
        usd += asked * (REQUEST_USD + OTHER_S * SECOND_USD) + grown.get("list", 0) * ROUND_S * SECOND_USD
        return Recovery(
            how=how,
            nodes=nodes,
            stood_s=self.engine.t - stood_from,
            wasted_min=wasted_s / 60,
            rounds=grown.get("list", 0),
            writes=writes,
            cents=usd * 100,
            dry=self.dry or stood_from < self.excused_until,
            awaited=self.launched,
        )


BUCKET_WRITES = (
    "add_observations",
    "append_all",
    "append_ledger",
    "cas_allocation",
    "cas_prices",
    "cas_record",
    "create_record",
    "drop_lease",
    "put",
    "put_request",
    "put_fact",
    "put_name",
    "put_progress",
    "put_spec",
    "put_tomb",
    "quarantine",
    "set_active",
    "take_lease",
)
LISTS = ("active_jobs", "facts_of", "list_requests", "list_facts", "list_ledger", "list_static_hellos")
# Objects that a verb reads beside its writes, or beyond the one of any ``read_...``: two hours of observations.
READS = {
    "add_observations": 1,
    "active_since": 1,
    "draining": 1,
    "drop_lease": 1,
    "get": 1,
    "get_all": 1,
    "has_begun": 1,
    "read_observations": 1,
    "take_lease": 1,
}
POLL = "idle poll"
SLOW_S = LONGEST_S / PATIENCE  # from then on a machine that waits polls every ``LONGEST_S``


def polls_in(seconds: float) -> int:
    """Of one machine that waits so long."""
    return bisect(_polls(), seconds) + max(0, int((seconds - SLOW_S) / LONGEST_S))


@cache
def _polls() -> list[float]:
    """When a machine polls, in seconds since it began to wait."""
    out, at = [], 0.0
    while at + pending_s(at) <= SLOW_S:
        at += pending_s(at)
        out.append(at)
    return out


def reads_of(polls: int, seconds: float) -> float:
    """Objects that so many polls within so many seconds make the function read: the record, and what is due.

    A process reads both again with the first poll after ``AGE_S``. At an even pace, which is the dearest.
    """
    if not polls:
        return 0.0
    return 2 * min(polls, PROCESSES * seconds / (AGE_S + PROCESSES * seconds / polls))
