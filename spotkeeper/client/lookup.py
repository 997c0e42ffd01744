"""Find jobs by id or name, view them, send them requests, and estimate how long a start takes."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from spotkeeper.client import logs
from spotkeeper.client.errors import CliError, Exit
from spotkeeper.client.target import Target, silence
from spotkeeper.contract.allocation import Allocation
from spotkeeper.contract.facts import HANG
from spotkeeper.contract.generation import Progress
from spotkeeper.contract.job import (
    START_S,
    JobRequest,
    JobSpec,
    RequestKind,
    deadline_at,
    spec_json,
    start_s,
    ungranted,
)
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.market import Prices
from spotkeeper.contract.names import JOB_ID, JOB_NAME
from spotkeeper.contract.parse.problem import nearest
from spotkeeper.contract.record import Hold, Outcome, Phase, Record
from spotkeeper.contract.stack import StackState
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.documents import CorruptError
from spotkeeper.reconcile.store.objects import StoreError
from spotkeeper.reconcile.store.store import Store
from spotkeeper.report.job.view import CLOUD, JobView, Site, job_view, last_crash

if TYPE_CHECKING:
    from spotkeeper.report.queue import Queue

TOMBS = paths.tomb("00000000").removesuffix("00000000")
READS = 16  # parallel reads of the bucket
MOST_ENDED = 200  # ended jobs that a search by name reads: about a second


class Unreadable(Struct, frozen=True):
    """A job whose record cannot be read; the job is not reconciled until a user repairs the record."""

    job: str
    unreadable: str
    remedy: str


class FoundJobs(Struct, frozen=True):
    records: tuple[Record, ...]
    unreadable: tuple[Unreadable, ...]


# -- find


def find_job(store: Store, word: str) -> Record:
    """Return the record of the job with this id or name. Of several ended jobs of this name, the newest counts.

    Raises:
        CliError: no such job exists; the message suggests a job with a similar name, if any.
    """
    job = store.read_name(word) if JOB_NAME.match(word) else None
    for candidate in (job, word):
        if candidate and JOB_ID.match(candidate) and (read := store.read_record(candidate)) is not None:
            return read.value
    records = all_jobs(store, finished=True).records
    if named := [record for record in records if record.name == word]:
        return max(named, key=lambda record: record.created)
    near = nearest(word, {record.name for record in records})
    hint = f" (did you mean {near}?)" if near else ""
    raise CliError(f"{word}: no such job{hint}", Exit.MISSING, "spotkeeper status --all lists them")


def record_of(store: Store, job: str) -> Record:
    """Read a job's record. Raises CliError if the record is gone."""
    read = store.read_record(job)
    if read is None:
        raise CliError(f"{job}: its record is gone", Exit.MISSING)
    return read.value


def progress_of(store: Store, job: str) -> Progress | None:
    """Return a job's progress; None if it is missing or unreadable (the next report writes it again)."""
    with contextlib.suppress(CorruptError):
        return store.read_progress(job)
    return None


def committed(store: Store, job: str) -> tuple[int, int] | None:
    """Return generation and step of the newest checkpoint that a job has reported."""
    progress = progress_of(store, job)
    if progress is None or progress.commit_gen is None or progress.commit_step is None:
        return None
    return progress.commit_gen, progress.commit_step


def earlier(store: Store, name: str) -> str | None:
    """Return the id of the newest job of this name, running or ended; None if none exists.

    Of the ended jobs, only the newest are searched (``MOST_ENDED``).
    """
    if (job := store.read_name(name)) is not None:
        return job
    ended = [path.removeprefix(TOMBS) for path in store.newest(TOMBS, MOST_ENDED)]
    named = [record for record in _read(store, ended).records if record.name == name]
    return max(named, key=lambda record: record.created).job if named else None


def all_jobs(store: Store, finished: bool) -> FoundJobs:
    """Return the unfinished jobs, and with ``finished`` the ended jobs too, in the order of submission."""
    jobs = set(store.active_jobs())
    if finished:
        jobs |= {path.removeprefix(TOMBS) for path in store.list(TOMBS)}
    return _read(store, sorted(jobs))


def unowned(store: Store, jobs: Sequence[str]) -> list[str]:
    """Return the unfinished ones of these jobs of which the function does not know the owner: the call failed."""
    return [record.job for record in _read(store, jobs).records if not (record.owner or record.over)]


def _read(store: Store, jobs: Sequence[str]) -> FoundJobs:

    def read(job: str) -> Record | Unreadable | None:
        try:
            return found.value if (found := store.read_record(job)) is not None else None
        except CorruptError as error:
            return Unreadable(job, str(error), error.remedy)

    with ThreadPoolExecutor(READS) as pool:
        found = tuple(pool.map(read, jobs))
    records = sorted((one for one in found if isinstance(one, Record)), key=lambda record: (record.created, record.job))
    return FoundJobs(tuple(records), tuple(one for one in found if isinstance(one, Unreadable)))


# -- view


def view_of(
    store: Store,
    record: Record,
    stack: StackState | None,
    now: float,
    site: Site = CLOUD,
    deadline: float | None = None,
    ledger: Sequence[Entry] | None = None,
    prices: Mapping[str, Prices] | None = None,
    queue: Queue | None = None,
) -> JobView:
    """Return the view of a job.

    It reads the job's progress and ledger and the pools' prices; for a job on hold also its requests; after a failure
    the log of the node that failed, after a hang the logs of several nodes.

    Args:
        now: virtual unix seconds.
        deadline: what :func:`deadline_of` returned; None: the view shows no deadline.
        ledger, prices: what :func:`ledger_of` and :func:`prices_of` returned, if they are read already.
        queue: what :func:`queue_of` returned.
    """
    ledger = ledger_of(store, record) if ledger is None else ledger
    prices = prices_of(store, stack) if prices is None else prices
    progress = progress_of(store, record.job)
    waits = record.phase is Phase.HOLD and resume_waits(store, record)
    log, failed = _crash_log(store, record, ledger)
    waiting = queue.waiting(record.job) if queue is not None else None
    disks = _with_disks(store, record, stack) if record.phase is Phase.HOLD else stack  # what a hold costs
    view = job_view(record, progress, ledger, disks, now, log, waits, prices, site)
    in_s = None if deadline is None else deadline - (record.created + view.elapsed_s)
    reason = view.reason if waiting is None else waiting.reason
    return replace(view, failed=failed, deadline_in_s=in_s, queue=waiting, reason=reason)


def _with_disks(store: Store, record: Record, stack: StackState | None) -> StackState | None:
    """Return the stack with the disks of this job, which has room for its scratch folder on each."""
    spec = store.read_spec(record.job, record.spec_key())
    if spec is None or stack is None or not spec.scratch_gb:
        return stack
    pools = (replace(pool, disk_gb=pool.disk_gb + spec.more_disk_gb()) for pool in stack.pools)
    return replace(stack, pools=tuple(pools))


def may_wait(record: Record) -> bool:
    """Whether the job can be in the queue: it lacks machines, or gives them up because the queue says so."""
    lacks = not record.nodes or any(record.nodes[index].cur is None for index in record.filled())
    return record.hold is Hold.QUEUE or (record.phase is Phase.RUN and (record.recalled or lacks))


def queue_of(store: Store, stack: StackState | None, now: float, names: Mapping[str, str]) -> Queue | None:
    """Return the queue if one of these jobs (id -> name) has a place in it; None also if it cannot be read.

    It reads the allocation, and the records of the jobs before them that their places name.
    """
    allocation = allocation_of(store) if names and stack is not None else Allocation()
    if stack is None or not any(claim.job in names for claim in allocation.claims):
        return None
    from spotkeeper.report.queue import Queue  # with the scheduler, which most commands need not load

    queue = Queue(allocation, stack, now)
    name_jobs(store, queue, names, names)
    return queue


def name_jobs(store: Store, queue: Queue, jobs: Collection[str], known: Mapping[str, str]) -> None:
    """Give a queue the names that these jobs' places need; those that are not ``known`` are read from records."""
    missing = queue.mentioned(jobs) - set(known)
    read = {record.job: record.name for record in _read(store, sorted(missing)).records} if missing else {}
    queue.names |= {**known, **read}


def allocation_of(store: Store) -> Allocation:
    """Return the allocation; an empty one if it is unreadable (the function's alarm says so)."""
    with contextlib.suppress(CorruptError):
        return store.read_allocation().value
    return Allocation()


def ledger_of(store: Store, record: Record) -> tuple[Entry, ...]:
    """Return all entries of a job's ledger, and those of its record's ``outbox``, which may be in the ledger already.

    A round stores new entries in the outbox and copies them to the ledger before it writes the record again.
    """
    return (*store.list_ledger(record.job), *record.outbox)


def site_of(store: Store, stack: StackState | None, target: Target) -> Site:
    """Return what a view shows of the stack: the speed of its clock, and for how long no tick has succeeded."""
    return replace(target.site(), no_tick=silence(store, stack, target))


def deadline_of(store: Store, record: Record) -> float | None:
    """Return the job's deadline in virtual unix seconds; None if its job file has none or is gone."""
    spec = store.read_spec(record.job, record.spec_key())
    if spec is None or spec.deadline is None:
        return None
    with contextlib.suppress(ValueError):  # submit refuses a malformed one
        return deadline_at(spec.deadline, record.created)
    return None


def ungranted_of(store: Store, stack: StackState | None, record: Record) -> tuple[str, ...]:
    """Return what an unfinished job does not get of its ``team`` and ``priority``, one line each."""
    spec = store.read_spec(record.job, record.spec_key()) if stack is not None and not record.over else None
    return ungranted(spec, stack, record.owner) if spec is not None and stack is not None else ()


def job_yaml(store: Store, record: Record) -> str:
    """Return a job's present file as YAML, without fields that have their default; "" if it is gone."""
    import msgspec

    spec = store.read_spec(record.job, record.spec_key())
    return "" if spec is None else msgspec.yaml.encode(msgspec.json.decode(spec_json(spec))).decode()


def prices_of(store: Store, stack: StackState | None) -> dict[str, Prices]:
    pools = tuple(pool.name for pool in stack.pools if pool.kind == "spot") if stack else ()
    return {pool: read.value for pool, read in store.read_prices(pools).items()}


def resume_waits(store: Store, record: Record) -> bool:
    """Return whether a user has requested to resume the job, and no round has handled this request yet."""
    done = set(record.requests_done)
    return any(ask.kind is RequestKind.RESUME and ask.id not in done for ask in store.list_requests(record.job))


def _crash_log(store: Store, record: Record, ledger: Sequence[Entry]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (end of the log, cause) of a job's last failure; at least one of the two is empty.

    Until the next generation starts, the end of the log is returned; after a hang, the cause (a few lines) instead.
    During the next generation the cause is returned. Later both are empty, because the job has recovered.
    """
    crash = last_crash(ledger)
    if crash is None or record.outcome not in (None, Outcome.FAILED) or record.gen > crash.gen + 1:
        return (), ()
    hung = any(entry.event is Event.CRASH and (entry.gen, entry.cause) == (crash.gen, HANG) for entry in ledger)
    if hung or record.gen > crash.gen:
        return (), logs.cause_of_failure(store, record, crash, hung=hung)
    nodes = [crash.node] if crash.node is not None else list(record.members or range(len(record.nodes)))
    for node in nodes:
        if data := logs.stored(store, record.job, node, crash.gen or record.gen):
            return logs.end_of_log(data), ()
    return (), ()


# -- requests


def withdraw(store: Store, name: str, now: float) -> str | None:
    """End a submission that was interrupted before it wrote the job's record. Nothing of the job has run.

    Returns the job's id. Returns None if no such submission exists or if the record appears meanwhile; in the second
    case the caller cancels the job as usual.
    """
    from spotkeeper.reconcile.controller import cleanup

    job = store.read_name(name) if JOB_NAME.match(name) else None
    if job is None or store.read_record(job) is not None:
        return None
    if cleanup.withdraw(store, job, name, now, "cancelled before its submission was complete") is None:
        return None
    store.delete_name(name, job)  # the next tick deletes the rest
    return job


def new_request(kind: RequestKind, now: float, by: str, **fields: Any) -> JobRequest:
    """Return a request with a new id; ``fields``: the fields of :class:`JobRequest` that only this kind has."""
    return JobRequest(id=f"{kind.value}-{secrets.token_hex(4)}", kind=kind, at=now, by=by, **fields)


def send_request(store: Store, record: Record, request: JobRequest) -> JobRequest:
    """Leave a request for the next round, which handles it exactly once.

    Raises:
        CliError: the job has ended, its job file does not allow this size, or nothing would change.
    """
    from spotkeeper.reconcile.decide.gang.resize import refusal

    refuse_over(record)
    nodes, done = request.nodes, set(record.requests_done)
    why = "" if request.go_back else _nothing_to_do(record, request)
    if why and all(other.id in done for other in store.list_requests(record.job)):  # a waiting request may change that
        raise CliError(f"{record.name} ({record.job}) {why}", Exit.REFUSED)
    spec = store.read_spec(record.job, record.spec_key()) if nodes is not None else None
    if spec is not None and nodes is not None and (why := refusal(spec, nodes)):
        raise CliError(f"{record.name} ({record.job}) cannot have {machines(nodes)}: {why}", Exit.REFUSED)
    store.put_request(record.job, request)
    return request


def _nothing_to_do(record: Record, request: JobRequest) -> str:
    """Return why the next round would refuse this request; "" if it would not."""
    from spotkeeper.reconcile.decide.gang.resize import drop_refusal

    kind, nodes, on_hold = request.kind, request.nodes, record.phase is Phase.HOLD
    if record.recalled or record.hold is Hold.QUEUE:
        comes_back = kind is RequestKind.RESUME and not request.spec_sha256
        return "waits in the queue, and goes on by itself: spotkeeper queue shows its place" if comes_back else ""
    if kind is RequestKind.PAUSE and (on_hold or record.pause):
        return f"is on hold already: {record.reason}" if on_hold else f"is about to go on hold: {record.pause}"
    if kind is RequestKind.RESUME and not on_hold and not record.pause:
        return "is not on hold: there is nothing to resume"
    if kind is RequestKind.RESIZE and nodes is not None:
        same = nodes == record.wanted() == (record.asked or len(record.nodes))
        return f"has {machines(nodes)} already" if same else drop_refusal(record.filled(), nodes, request.drop)
    moves = record.move is not None or record.asked_zone is not None
    if kind is RequestKind.MOVE and request.zone == record.zone and not moves:
        return f"is in {request.zone} already"
    return ""


def machines(count: int) -> str:
    return f"{count} machine" + ("" if count == 1 else "s")


def refuse_over(record: Record) -> None:
    """Raise CliError if the job has ended: it accepts no requests."""
    if record.over:
        outcome = record.outcome.value if record.outcome else "over"
        raise CliError(f"{record.name} ({record.job}) is over: {outcome}", Exit.REFUSED)


# -- how long a start takes


def starts_of(store: Store | None, stack: StackState, now: float, scale: float) -> Callable[[JobSpec], float]:
    """Return a function that tells how many seconds a job takes to start; ``read_job`` calls this function.

    The function reads the bucket and remembers its results. If ``store`` is None, it returns the default, ``START_S``.
    ``scale``: virtual seconds per real second.
    """

    @cache
    def measured(name: str, pools: tuple[str, ...]) -> float:
        return START_S if store is None else measured_s(store, name, pools, now, scale)

    def starts(job: JobSpec) -> float:
        names = job.pool_names()
        return measured(job.name, tuple(p.name for p in stack.pools if not names or p.name in names))

    return starts


def measured_s(store: Store, name: str, pools: Iterable[str], now: float, scale: float) -> float:
    """Return an estimate of how long a start of a job takes, virtual seconds.

    The estimate adds up measured times: from a machine's request to its hello, in the slowest of these pools; and, from
    the newest job of this name, a save and the time from a generation's start to its first step. Without times of such
    a job, or if the bucket fails, the estimate is ``START_S``. It is at least ``START_S`` if no machine of these pools
    has booted recently.
    """
    from spotkeeper.reconcile.select import market

    try:
        job = earlier(store, name)
        progress = None if job is None else store.read_progress(job)
        if progress is None or progress.begin_s is None:
            return START_S
        boots = market.boots(store, tuple(pools), now)
    except StoreError:
        return START_S
    return start_s(max(boots.values(), default=None), progress.begin_s, (progress.save_s or 0.0) * scale)
