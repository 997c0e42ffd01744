"""Jobs as commands see them: found by id or name, viewed, asked, their logs read."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct
from msgspec.structs import replace

from spotkeeper.cli import failure
from spotkeeper.cli.errors import CliError, Exit
from spotkeeper.reconcile import paths
from spotkeeper.reconcile import round as round_
from spotkeeper.reconcile.decide.sizes import refusal
from spotkeeper.reconcile.store_api import CorruptError, Store
from spotkeeper.report.view import CLOUD, JobView, Site, job_view, last_crash
from spotkeeper.spec.hang import CAUSE as HANG
from spotkeeper.spec.job import Ask, AskKind, deadline_at
from spotkeeper.spec.ledger import Entry, Event
from spotkeeper.spec.market import Prices
from spotkeeper.spec.names import JOB_ID, JOB_NAME
from spotkeeper.spec.problem import nearest
from spotkeeper.spec.record import Outcome, Phase, Record
from spotkeeper.spec.stack import StackState

TOMBS = paths.tomb("00000000").removesuffix("00000000")
READS = 16  # at once
LOOKED_AT = 200  # jobs that are over, for one of a name: a second


class Unreadable(Struct, frozen=True):
    """A job whose record makes no sense: it is left alone until somebody mends it."""

    job: str
    unreadable: str
    remedy: str


class Found(Struct, frozen=True):
    records: tuple[Record, ...]
    unreadable: tuple[Unreadable, ...]


def find_job(store: Store, word: str) -> Record:
    """The record of the job with this id or name; of finished jobs of one name, the newest.

    Raises:
        CliError: there is none; names the nearest.
    """
    job = store.read_name(word) if JOB_NAME.match(word) else None
    for candidate in (job, word):
        if candidate and JOB_ID.match(candidate):
            held = store.read_record(candidate)
            if held is not None:
                return held.value
    records = all_jobs(store, finished=True).records
    named = [record for record in records if record.name == word]
    if named:
        return max(named, key=lambda record: record.created)
    near = nearest(word, {record.name for record in records})
    hint = f" (did you mean {near}?)" if near else ""
    raise CliError(f"{word}: no such job{hint}", Exit.MISSING, "spotkeeper status --all lists them")


def earlier(store: Store, name: str) -> str | None:
    """The id of the newest job of this name, also of one that is over; None: there is none.

    Of those that are over, the ``LOOKED_AT`` that ended last are looked at.
    """
    if (job := store.read_name(name)) is not None:
        return job
    over = [path.removeprefix(TOMBS) for path in store.newest(TOMBS, LOOKED_AT)]
    named = [record for record in _read(store, over).records if record.name == name]
    return max(named, key=lambda record: record.created).job if named else None


def all_jobs(store: Store, finished: bool) -> Found:
    """Unfinished jobs; with ``finished`` also those whose tombstone still stands. By submission."""
    jobs = set(store.active_jobs())
    if finished:
        jobs |= {path.removeprefix(TOMBS) for path in store.list(TOMBS)}
    return _read(store, sorted(jobs))


def _read(store: Store, jobs: Sequence[str]) -> Found:
    """Their records, several at once: each is a request to the bucket."""

    def read(job: str) -> Record | Unreadable | None:
        try:
            return held.value if (held := store.read_record(job)) is not None else None
        except CorruptError as error:
            return Unreadable(job, str(error), error.remedy)

    with ThreadPoolExecutor(READS) as pool:
        found = tuple(pool.map(read, jobs))
    records = sorted((one for one in found if isinstance(one, Record)), key=lambda record: (record.created, record.job))
    return Found(tuple(records), tuple(one for one in found if isinstance(one, Unreadable)))


def view_of(
    store: Store,
    record: Record,
    stack: StackState | None,
    now: float,
    site: Site = CLOUD,
    deadline: float | None = None,
) -> JobView:
    """Five reads of the bucket; one more for the log of a job whose own code failed, one for a job that holds.

    Of a job that hung, a few: each rank's log. ``deadline``: of :func:`deadline_of`, where it is to be seen.
    """
    ledger = (*store.list_ledger(record.job), *record.outbox)
    progress = None
    with contextlib.suppress(CorruptError):  # the next report writes it again
        progress = store.read_progress(record.job)
    waits = record.phase is Phase.HOLD and resume_waits(store, record)
    log, failed = _crash_log(store, record, ledger)
    view = job_view(record, progress, ledger, stack, now, log, waits, prices_of(store, stack), site)
    in_s = None if deadline is None else deadline - (record.created + view.elapsed_s)
    return replace(view, failed=failed, deadline_in_s=in_s)


def deadline_of(store: Store, record: Record) -> float | None:
    """Of its job file, virtual unix seconds; None: it has none, or that file is gone."""
    spec = store.read_spec(record.job, record.spec_key())
    if spec is None or spec.deadline is None:
        return None
    with contextlib.suppress(ValueError):  # submit refuses one that makes no sense
        return deadline_at(spec.deadline, record.created)
    return None


def prices_of(store: Store, stack: StackState | None) -> dict[str, Prices]:
    """What spot machines of the stack's pools cost and cost before, as far as the cloud told; by pool."""
    pools = tuple(pool.name for pool in stack.pools if pool.kind == "spot") if stack else ()
    return {pool: held.value for pool, held in store.read_prices(pools).items()}


def resume_waits(store: Store, record: Record) -> bool:
    """Whether somebody asked to resume the job, and no round has taken it in yet."""
    done = set(record.asks_done)
    return any(ask.kind is AskKind.RESUME and ask.id not in done for ask in store.list_asks(record.job))


def _crash_log(store: Store, record: Record, ledger: tuple[Entry, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The end of the log of a job that failed, and why; of one that has begun anew since, or that hung, only why.

    Neither of one that has begun anew more than once: it got over that.
    """
    crash = last_crash(ledger)
    if crash is None or record.outcome in (Outcome.SUCCEEDED, Outcome.CANCELLED) or record.gen > crash.gen + 1:
        return (), ()
    hung = any(entry.event is Event.CRASH and (entry.gen, entry.cause) == (crash.gen, HANG) for entry in ledger)
    if hung or record.gen > crash.gen:
        return (), failure.short(store, record, crash, hung=hung)
    return _end_of_log(store, record, crash), ()


def _end_of_log(store: Store, record: Record, crash: Entry) -> tuple[str, ...]:
    ranks = [crash.rank] if crash.rank is not None else list(record.members or range(len(record.ranks)))
    for rank in ranks:
        data = store.get(paths.log(record.job, rank, crash.gen or record.gen))
        if data:
            return failure.end_of_log(data)
    return ()


def withdraw(store: Store, name: str, now: float) -> str | None:
    """End a submission that was cut off before its record: nothing ever ran. Its job's id, or None.

    Where its record comes first after all, it is an ordinary job, and is cancelled as one.
    """
    job = store.read_name(name) if JOB_NAME.match(name) else None
    if job is None or store.read_record(job) is not None:
        return None
    return job if round_.withdraw(store, job, name, now, "cancelled before it was submitted whole") else None


def ask(
    store: Store,
    record: Record,
    kind: AskKind,
    now: float,
    by: str,
    *,
    nodes: int | None = None,
    spec_sha256: str | None = None,
    go_back: bool = False,
) -> Ask:
    """Leave a wish for the next round, which takes it in exactly once.

    ``nodes``: of a resize. ``spec_sha256``: of a resume, the stored job file to go on with. ``go_back``: of a
    resume, without the newest checkpoint.

    Raises:
        CliError: the job has ended, its job file does not allow this size, or it is so already.
    """
    refuse_over(record)
    done = set(record.asks_done)
    why = "" if go_back else _so_already(record, kind, nodes)
    if why and all(other.id in done for other in store.list_asks(record.job)):  # what waits may change it yet
        raise CliError(f"{record.name} ({record.job}) {why}", Exit.REFUSED)
    spec = store.read_spec(record.job, record.spec_key()) if nodes is not None else None
    if spec is not None and nodes is not None and (why := refusal(spec, nodes)):
        raise CliError(f"{record.name} ({record.job}) cannot have {machines(nodes)}: {why}", Exit.REFUSED)
    wish = Ask(
        id=f"{kind.value}-{secrets.token_hex(4)}",
        kind=kind,
        at=now,
        by=by,
        nodes=nodes,
        spec_sha256=spec_sha256,
        go_back=go_back,
    )
    store.put_ask(record.job, wish)
    return wish


def _so_already(record: Record, kind: AskKind, nodes: int | None) -> str:
    """Why the next round would refuse this wish, as the record stands; or ''."""
    holds = record.phase is Phase.HOLD
    if kind is AskKind.PAUSE and (holds or record.pause):
        return f"holds already: {record.reason}" if holds else f"is about to hold: {record.pause}"
    if kind is AskKind.RESUME and not holds and not record.pause:
        return "is not on hold: there is nothing to resume"
    if kind is AskKind.RESIZE and nodes == record.wanted():
        return f"has {machines(nodes)} already"
    return ""


def machines(count: int) -> str:
    return f"{count} machine" + ("" if count == 1 else "s")


def refuse_over(record: Record) -> None:
    """
    Raises:
        CliError: the job has ended, so it takes no wish.
    """
    if record.phase in (Phase.END, Phase.DONE):
        outcome = record.outcome.value if record.outcome else "over"
        raise CliError(f"{record.name} ({record.job}) is over: {outcome}", Exit.REFUSED)


def log_data(store: Store, record: Record, rank: int, gen: int | None = None) -> tuple[int, bytes]:
    """The newest (or a given) generation's log of a rank: its generation and what is stored (``spec.joblog``).

    Raises:
        CliError: no log, or no such rank.
    """
    check_rank(record, rank)
    gens = log_gens(store, record, rank)
    if not gens:
        what = f"rank {rank} has no log" + (f" of generation {gen}" if gen is not None else "")
        raise no_log(record, what, "the others: --rank all" if len(record.ranks) > 1 else "")
    if gen is not None and gen not in gens:
        remedy = f"generations with a log: {', '.join(map(str, gens))}"
        raise CliError(f"{record.name}: rank {rank} has no log of generation {gen}", Exit.MISSING, remedy)
    chosen = gens[-1] if gen is None else gen
    return chosen, store.get(paths.log(record.job, rank, chosen)) or b""


def no_log(record: Record, what: str, otherwise: str = "") -> CliError:
    """What to say where nothing is stored of a rank, or of all. ``otherwise``: a remedy once the job is over."""
    if record.phase not in (Phase.END, Phase.DONE):
        return CliError(f"{record.name}: {what} yet", Exit.MISSING, "a log appears once something is printed")
    return CliError(f"{record.name}: {what}: nothing was printed", Exit.MISSING, otherwise)


def check_rank(record: Record, rank: int) -> None:
    """
    Raises:
        CliError: the job has no such rank.
    """
    last = max(1, len(record.ranks)) - 1
    if not 0 <= rank <= last:
        ranks = f"ranks 0 to {last}" if last else "only rank 0"
        raise CliError(f"rank {rank}: {record.name} has {ranks}", Exit.MISSING)


def whose_log(store: Store, record: Record, gen: int) -> str:
    """What is told before a generation's log, so that a failure that is over is not taken for a new one."""
    crash = last_crash((*store.list_ledger(record.job), *record.outbox))
    return f"generation {gen}, which failed:" if crash is not None and crash.gen == gen else f"generation {gen}:"


def log_gens(store: Store, record: Record, rank: int) -> list[int]:
    """Generations whose log of this rank is kept, in order."""
    prefix = paths.log(record.job, rank, 0).rpartition("/")[0] + "/"
    stems = (path[len(prefix) :].removesuffix(".log") for path in store.list(prefix))
    return sorted(int(stem) for stem in stems if stem.isdigit())
