"""The bucket as dictionaries: ``store.Store`` for tests that are about decisions, not about storage."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from spotkeeper.contract.allocation import Allocation
from spotkeeper.contract.facts import Fact
from spotkeeper.contract.generation import Progress
from spotkeeper.contract.job import JobRequest, JobSpec
from spotkeeper.contract.ledger import Entry
from spotkeeper.contract.market import Network, Observation, Prices
from spotkeeper.contract.notification import Outgoing
from spotkeeper.contract.record import Record
from spotkeeper.contract.stack import StackState
from spotkeeper.contract.sweep import SweepState
from spotkeeper.contract.sweepfile import Cohort, SweepSpec, SweepStop
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.clock_skew import SKEW_S
from spotkeeper.reconcile.store.documents import StaticHello, Versioned
from spotkeeper.reconcile.store.objects import Deadline


class MemoryStore:
    """One process, no I/O. ``on_write`` is called around every compare-and-swap (a place to interfere)."""

    def __init__(self, stack: StackState | None = None) -> None:
        self.stack = stack
        self.records: dict[str, tuple[Record, int]] = {}
        self.facts: dict[str, dict[str, Fact]] = {}
        self.allocation: tuple[Allocation, int] = (Allocation(), 0)
        self.sweeps: dict[str, tuple[SweepState, int]] = {}
        self.sweep_specs: dict[str, SweepSpec] = {}
        self.stops: dict[str, dict[int, SweepStop]] = {}
        self.cohorts: dict[str, dict[int, Cohort]] = {}
        self.trials: dict[str, dict[int, str]] = {}
        self.requests: dict[str, dict[str, JobRequest]] = {}
        self.active: set[str] = set()
        self.since: dict[str, float | None] = {}
        self.leases: dict[str, tuple[str, float, float | None]] = {}
        self.ledgers: dict[str, dict[tuple[float, str], Entry]] = {}
        self.specs: dict[str, JobSpec] = {}
        self.progresses: dict[str, Progress] = {}
        self.hellos: dict[str, StaticHello] = {}
        self.prices: dict[str, Versioned[Prices]] = {}
        self.networks: dict[tuple[str, str], Network] = {}
        self.observations: dict[tuple[str, int], list[Observation]] = {}
        self.tombs: dict[str, float] = {}
        self.names: dict[str, str] = {}
        self.quarantined: list[str] = []
        self.things: dict[str, bytes] = {}
        self.notifications: dict[str, tuple[Outgoing, int]] = {}
        self.drain = False
        self.on_write: Callable[[], None] = lambda: None
        self.record_writes = 0
        self.lists = 0

    def until(self, deadline: Deadline) -> MemoryStore:
        return self

    def read_record(self, job: str) -> Versioned[Record] | None:
        found = self.records.get(job)
        return Versioned(found[0], str(found[1])) if found else None

    def create_record(self, record: Record) -> bool:
        if record.job in self.records:
            return self.records[record.job][0].nonce == record.nonce
        self.records[record.job] = (record, 1)
        return True

    def cas_record(self, record: Record, token: str) -> str | None:
        self.on_write()
        won = self._cas_record(record, token)
        self.on_write()
        return won

    def _cas_record(self, record: Record, token: str) -> str | None:
        old, version = self.records[record.job]
        if str(version) != token:
            return token if old.nonce == record.nonce else None
        self.records[record.job] = (record, version + 1)
        self.record_writes += 1
        return str(version + 1)

    def list_facts(self, job: str) -> tuple[Fact, ...]:
        self.lists += 1
        return tuple(fact for _, fact in sorted(self.facts.get(job, {}).items()))

    def facts_of(self, job: str, uid: str) -> tuple[Fact, ...]:
        return tuple(fact for fact in self.list_facts(job) if fact.uid == uid)

    def put_fact(self, job: str, fact: Fact) -> bool:
        return self.facts.setdefault(job, {}).setdefault(fact.key(), fact) is fact

    def delete_facts(self, job: str, facts: tuple[Fact, ...]) -> None:
        for fact in facts:
            self.facts.get(job, {}).pop(fact.key(), None)

    def read_allocation(self) -> Versioned[Allocation]:
        allocation, version = self.allocation
        return Versioned(allocation, str(version) if version else "")

    def cas_allocation(self, allocation: Allocation, token: str) -> str | None:
        self.on_write()
        version = self.allocation[1]
        if token != (str(version) if version else ""):
            return None
        self.allocation = (allocation, version + 1)
        return str(version + 1)

    def read_sweep(self, name: str) -> Versioned[SweepState]:
        state, version = self.sweeps.get(name, (SweepState(sweep=name), 0))
        return Versioned(state, str(version) if version else "")

    def cas_sweep(self, state: SweepState, token: str) -> str | None:
        self.on_write()
        version = self.sweeps.get(state.sweep, (state, 0))[1]
        if token != (str(version) if version else ""):
            return None
        self.sweeps[state.sweep] = (state, version + 1)
        return str(version + 1)

    def read_sweep_spec(self, name: str) -> SweepSpec | None:
        return self.sweep_specs.get(name)

    def create_sweep_spec(self, spec: SweepSpec) -> bool:
        return self.sweep_specs.setdefault(spec.file.name, spec) == spec

    def list_cohorts(self, name: str) -> tuple[Cohort, ...]:
        return tuple(cohort for _, cohort in sorted(self.cohorts.get(name, {}).items()))

    def create_cohort(self, name: str, cohort: Cohort) -> bool:
        return self.cohorts.setdefault(name, {}).setdefault(cohort.first, cohort) == cohort

    def read_trial(self, name: str, number: int) -> str:
        return self.trials.get(name, {}).get(number, "")

    def list_trials(self, name: str) -> dict[int, str]:
        return dict(self.trials.get(name, {}))

    def create_trial(self, name: str, number: int, job: str) -> bool:
        return self.trials.setdefault(name, {}).setdefault(number, job) == job

    def list_stops(self, name: str) -> tuple[SweepStop, ...]:
        return tuple(stop for _, stop in sorted(self.stops.get(name, {}).items()))

    def create_stop(self, name: str, stop: SweepStop) -> bool:
        return self.stops.setdefault(name, {}).setdefault(stop.below, stop) == stop

    def list_sweeps(self) -> tuple[str, ...]:
        return tuple(sorted(self.sweep_specs))

    def put_sweep_source(self, name: str, sha256: str, tar: bytes) -> None:
        self.put(paths.sweep_source(name, sha256), tar)

    def list_requests(self, job: str) -> tuple[JobRequest, ...]:
        return tuple(sorted(self.requests.get(job, {}).values(), key=lambda request: (request.at, request.id)))

    def put_request(self, job: str, request: JobRequest) -> bool:
        return self.requests.setdefault(job, {}).setdefault(request.id, request) is request

    def delete_request(self, job: str, request_id: str) -> None:
        self.requests.get(job, {}).pop(request_id, None)

    def active_jobs(self) -> tuple[str, ...]:
        return tuple(sorted(self.active))

    def set_active(self, job: str, since: float | None = None) -> None:
        if job not in self.active:
            self.active.add(job)
            self.since[job] = since

    def active_since(self, job: str) -> float | None:
        return self.since.get(job) if job in self.active else None

    def clear_active(self, job: str) -> None:
        self.active.discard(job)

    def take_lease(
        self, job: str, nonce: str, now: float, ttl_s: float, begin: Callable[[], bool] = lambda: True
    ) -> bool:
        if job not in self.leases and not begin():
            return False
        holder, until, due = self.leases.get(job, ("", 0.0, None))
        if holder and holder != nonce and now < until <= now + ttl_s + SKEW_S:
            return False
        self.leases[job] = (nonce, now + ttl_s, due)
        return True

    def has_begun(self, job: str) -> bool:
        return job in self.leases or bool(self.ledgers.get(job))

    def begin(self, job: str) -> None:
        self.leases.setdefault(job, ("", 0.0, None))

    def drop_lease(self, job: str, nonce: str, due: float | None) -> None:
        if self.leases.get(job, ("",))[0] == nonce:
            self.leases[job] = ("", 0.0, due)

    def read_due(self, job: str) -> float | None:
        holder, until, due = self.leases.get(job, ("", 0.0, None))
        return until if holder else due

    def append_ledger(self, job: str, entry: Entry) -> bool:
        return self.ledgers.setdefault(job, {}).setdefault((entry.at, entry.id), entry) is entry

    def append_all(self, job: str, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self.append_ledger(job, entry)

    def appended(self, job: str, entries: Sequence[Entry]) -> bool:
        there = self.ledgers.get(job, {})
        return bool(entries) and all((entry.at, entry.id) in there for entry in entries)

    def put_notification(self, outgoing: Outgoing) -> bool:
        entry = (outgoing, 1)
        return self.notifications.setdefault(outgoing.notification.id, entry) is entry

    def list_notifications(self) -> tuple[Versioned[Outgoing], ...]:
        found = [Versioned(outgoing, str(version)) for outgoing, version in self.notifications.values()]
        return tuple(sorted(found, key=lambda each: each.value.notification.at))

    def cas_notification(self, outgoing: Outgoing, token: str) -> str | None:
        _, version = self.notifications.get(outgoing.notification.id, (None, 0))
        if str(version) != token:
            return None
        self.notifications[outgoing.notification.id] = (outgoing, version + 1)
        return str(version + 1)

    def delete_notification(self, outgoing: Outgoing) -> None:
        self.notifications.pop(outgoing.notification.id, None)

    def list_ledger(self, job: str) -> tuple[Entry, ...]:
        return tuple(entry for _, entry in sorted(self.ledgers.get(job, {}).items()))

    def read_stack(self) -> StackState | None:
        return self.stack

    def draining(self) -> bool:
        return self.drain

    def read_spec(self, job: str, sha256: str = "") -> JobSpec | None:
        return self.specs.get(job + sha256)

    def put_spec(self, job: str, spec: JobSpec, sha256: str = "") -> None:
        self.specs[job + sha256] = spec

    def put_source(self, job: str, sha256: str, tar: bytes) -> None:
        self.put(paths.source(job, sha256), tar)

    def read_progress(self, job: str) -> Progress | None:
        return self.progresses.get(job)

    def put_progress(self, job: str, progress: Progress) -> None:
        self.progresses[job] = progress

    def list_static_hellos(self) -> tuple[StaticHello, ...]:
        return tuple(self.hellos.values())

    def put_static_hello(self, hello: StaticHello) -> bool:
        new = self.hellos.get(hello.machine, replace(hello, boot="")).boot != hello.boot
        if new:
            self.hellos[hello.machine] = hello
        return new

    def read_prices(self, pools: tuple[str, ...]) -> dict[str, Versioned[Prices]]:
        return {pool: self.prices[pool] for pool in pools if pool in self.prices}

    def cas_prices(self, prices: Prices, token: str) -> str | None:
        old = self.prices.get(prices.pool)
        if token != (old.token if old else ""):
            return None
        self.prices[prices.pool] = Versioned(prices, f"{prices.asked}.{len(prices.runs)}.{token[:40]}")
        return self.prices[prices.pool].token

    def read_networks(self) -> tuple[Network, ...]:
        return tuple(self.networks.values())

    def put_network(self, network: Network) -> None:
        self.networks[network.machine_type, network.zone] = network

    def read_observations(self, pools: tuple[str, ...], hours: tuple[int, ...]) -> dict[str, tuple[Observation, ...]]:
        return {pool: tuple(s for h in sorted(hours) for s in self.observations.get((pool, h), ())) for pool in pools}

    def add_observations(self, pool: str, hour: int, observations: tuple[Observation, ...]) -> bool:
        there = self.observations.setdefault((pool, hour), [])
        there += [observation for observation in dict.fromkeys(observations) if observation not in there]
        return True

    def put_tomb(self, job: str, at: float) -> None:
        self.tombs[job] = at

    def read_tomb(self, job: str) -> float | None:
        return self.tombs.get(job)

    def read_name(self, name: str) -> str | None:
        return self.names.get(name)

    def put_name(self, name: str, job: str) -> bool:
        return self.names.setdefault(name, job) is job

    def delete_name(self, name: str, job: str) -> None:
        if self.names.get(name) == job:
            del self.names[name]

    def quarantine(self, text: str) -> None:
        self.quarantined.append(text)

    def get(self, path: str) -> bytes | None:
        return self.things.get(path)

    def get_all(self, wanted: tuple[str, ...]) -> tuple[bytes | None, ...]:
        return tuple(map(self.get, wanted))

    def part(self, path: str, start: int, size: int) -> bytes | None:
        data = self.get(path)
        return None if data is None else data[start : start + size]

    def create(self, path: str, data: bytes) -> bool:
        return bool(self.things.setdefault(path, data) == data)

    def put(self, path: str, data: bytes) -> None:
        self.things[path] = data

    def delete(self, path: str) -> None:
        self.things.pop(path, None)

    def list(self, prefix: str) -> tuple[str, ...]:
        hours = (paths.market_hour(pool, hour) for pool, hour in self.observations)
        told = (paths.entry(job, at, id_) for job, entries in self.ledgers.items() for at, id_ in entries)
        return tuple(builtins.sorted(path for path in (*self.things, *hours, *told) if path.startswith(prefix)))
