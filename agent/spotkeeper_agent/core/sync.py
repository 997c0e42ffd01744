"""The requests to the function: the agent polls one endpoint, and no fact is lost on the way.

Facts wait in a spool on disk until the function has acknowledged them; a restarted agent sends those that are left.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import requests
from msgspec import Struct
from msgspec.structs import replace

from spotkeeper.clock import Clock
from spotkeeper.contract import codec
from spotkeeper.contract.facts import Kind
from spotkeeper.contract.generation import DocState, FactIn, Progress, Sync, SyncReply
from spotkeeper_agent.cloud.metadata import Metadata, MetadataError
from spotkeeper_agent.core.events import Answered
from spotkeeper_agent.core.log import Log

POLL_S = 5.0  # virtual
PENDING_S = 0.5  # virtual; first pause while a change is awaited
PATIENCE = 1 / 15  # later pauses as a share of the time waited so far
LONGEST_S = 15.0  # virtual; longest pause: a gang may wait ten minutes for its last machines
# Lower limits: with a fast clock, polls would cost more than the training beside them.
POLL_FLOOR_S = 0.5  # real
PENDING_FLOOR_S = 0.1  # real
PATH = "/v1/sync"
CONNECT_S = 3.0
ANSWER_S = 30.0  # a sync with new facts is answered after a round with its cloud calls
POLL_ANSWER_S = 6.0  # a poll is answered at once; two lost answers leave time to answer a roll call (``lone_roll_s``)
AT_ONCE = 32  # facts per request, the function's maximum
MACHINE_FACTS = frozenset({Kind.NOTICE, Kind.REPRIEVE})
ANSWERS = frozenset({Kind.HERE, Kind.STACKS})  # to a roll call


def pending_s(waited: float) -> float:
    """Return the virtual seconds until the next poll of an agent that has waited ``waited`` seconds for a change.

    The interval grows with the wait, to save requests. After a minute of waiting it is 4 s, so the agent notices a
    change 2 s late on average.
    """
    return min(LONGEST_S, max(PENDING_S, PATIENCE * waited))


def answer_s(body: Sync) -> float:
    """Return the real seconds to wait for the answer to this request.

    A repeated request (``again``) starts a round, which takes long if the cloud is slow. If the agent gave up before
    the round's end each time, it would never get an answer.
    """
    quick = not body.again and all(fact.kind in ANSWERS for fact in body.facts)
    return POLL_ANSWER_S if quick else ANSWER_S


class SyncError(Exception):
    """A request got no usable answer; the same request is sent again."""


class SyncRefusedError(SyncError):
    """The function rejects the request permanently (HTTP 400)."""


class FunctionClient:
    """Sends ``POST <function>/v1/sync`` with this machine's proof of identity. Not thread-safe."""

    def __init__(self, url: str, metadata: Metadata) -> None:
        self._url = url
        self._metadata = metadata
        self._session = requests.Session()

    def sync(self, body: Sync) -> SyncReply:
        """Send one request.

        Raises:
            SyncRefusedError: HTTP 400, the function does not accept the body.
            SyncError: any other failure.
        """
        try:
            said = msgspec.json.encode(body)
            answer = self._session.post(
                self._url + PATH,
                data=said,
                headers=self._metadata.prove(self._url, PATH, said),
                timeout=(CONNECT_S, answer_s(body)),
            )
        except MetadataError as error:
            raise SyncError(str(error)) from None
        except requests.RequestException as error:
            raise SyncError(type(error).__name__) from None
        if answer.status_code in (401, 403):  # AWS refuses an old signature with 403
            self._metadata.forget_identity()
        if answer.status_code == 400:
            raise SyncRefusedError(f"HTTP 400: {answer.text[:200]}")
        if answer.status_code != 200:
            raise SyncError(f"HTTP {answer.status_code}")
        try:
            return codec.decode(answer.content, SyncReply)
        except msgspec.DecodeError as error:
            raise SyncError(f"answer: {error}") from None


class _Spooled(Struct, frozen=True):
    boot: str
    job: str | None
    facts: tuple[FactIn, ...]


class Outbox:
    """The facts that the function has not acknowledged, in order, in memory and on disk (the spool). Thread-safe.

    Facts of earlier boots on the disk are dropped, since the function would take them for this boot's facts.
    """

    def __init__(self, folder: Path, boot: str, log: Log) -> None:
        self._path = folder / "facts.json"
        self._boot = boot
        self._log = log
        self._lock = threading.Lock()
        self._job: str | None = None
        self._facts: list[FactIn] = []
        self._delivered: set[FactIn] = set()
        with contextlib.suppress(OSError, msgspec.DecodeError):
            left = codec.decode(self._path.read_bytes(), _Spooled)
            if left.boot == boot:
                self._job, self._facts = left.job, list(left.facts)

    def assigned(self, job: str | None) -> None:
        """Begin another job or attempt: forget which facts were delivered, and drop the previous job's waiting facts.

        Two kinds of waiting facts stay: notices and reprieves, which are about the machine and now get generation 0,
        and facts of the kind DROPPED, which themselves name the attempt that they are about.
        """
        with self._lock:
            if job != self._job:
                own = [replace(f, gen=0) if f.kind in MACHINE_FACTS else f for f in self._facts]
                self._facts = [fact for fact in own if fact.attempt is not None or fact.kind in MACHINE_FACTS]
            self._job = job
            self._delivered.clear()
            self._save()

    def add(self, fact: FactIn, *, again: bool = False) -> bool:
        """Queue a fact; return False if it is already queued, or if it was delivered and ``again`` is False."""
        with self._lock:
            if (fact in self._delivered and not again) or fact in self._facts:
                return False
            self._facts.append(fact)
            self._save()
            return True

    def waiting(self) -> tuple[FactIn, ...]:
        with self._lock:
            return tuple(self._facts)

    def delivered(self, facts: tuple[FactIn, ...]) -> None:
        with self._lock:
            self._delivered.update(facts)
            self._facts = [fact for fact in self._facts if fact not in facts]
            if facts:
                self._save()

    def _save(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_suffix(".tmp")
            temporary.write_bytes(msgspec.json.encode(_Spooled(self._boot, self._job, tuple(self._facts))))
            temporary.replace(self._path)
        except OSError as error:
            self._log.once(f"spool {error.errno}", "spool.trouble", error=str(error))


class SyncWant(Struct, frozen=True):
    """Fields of the next requests to the function, as the loop sets them."""

    ver: int = 0
    job: str | None = None
    pending: bool = True
    progress: Progress | None = None


class Syncer(threading.Thread):
    """A thread that polls forever; ``post`` gets an :class:`Answered` for every answer."""

    def __init__(
        self,
        client: FunctionClient,
        outbox: Outbox,
        boot: str,
        post: Callable[[Answered], None],
        clock: Clock,
        log: Log,
    ) -> None:
        super().__init__(name="sync", daemon=True)
        self._client = client
        self._outbox = outbox
        self._boot = boot
        self._post = post
        self._clock = clock
        self._log = log
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._want = SyncWant()
        self._at_once = AT_ONCE
        self._again = bool(outbox.waiting())  # whether the last request got no answer, or may have got none
        self._old_jobs: tuple[str, ...] = ()
        self._stage: tuple[int, DocState] | None = None  # generation and state of the newest document
        self._awaited: tuple[object, float] | None = None  # the awaited change, and since when (virtual)

    def say(self, fact: FactIn, *, again: bool = False) -> None:
        """Send a fact until it is delivered. ``again``: send it with the next poll even if it was delivered before."""
        if self._outbox.add(fact, again=again) and not again:
            self._log("fact", kind=fact.kind.value, gen=fact.gen, value=fact.value)
            self._wake.set()

    def assigned(self, job: str | None) -> None:
        self._outbox.assigned(job)

    def undelivered(self) -> int:
        return len(self._outbox.waiting())

    def ask_about(self, old_jobs: tuple[str, ...]) -> None:
        """Ask once which of these jobs are over (``core/__init__.py``); the reply in :class:`Answered` names them."""
        with self._lock:
            self._old_jobs = old_jobs

    def want(self, ver: int, job: str | None, pending: bool, progress: Progress | None = None) -> None:
        """Set the content of the next requests.

        ``pending``: the machine waits for something from the function. If it begins to wait, the current pause ends.
        """
        with self._lock:
            hurry = pending and not self._want.pending
            self._want = SyncWant(ver, job, pending, progress or self._want.progress)
        if hurry:
            self._wake.set()

    def run(self) -> None:
        while True:
            self._exchange()
            if self._wake.wait(self._pause_s()):
                self._wake.clear()

    def _pause_s(self) -> float:
        """Return the real seconds until the next poll. A new generation, document state or job makes polls frequent.

        Other changes of the document do not: while a large gang starts, each machine that boots makes such a change.
        """
        with self._lock:
            want = self._want
        if not want.pending:
            self._awaited = None
            return max(self._clock.real_s(POLL_S), POLL_FLOOR_S)
        what, now = (self._stage, want.job), self._clock.now()
        if self._awaited is None or self._awaited[0] != what:
            self._awaited = what, now
        pause = pending_s(now - self._awaited[1])
        if want.job is None:  # an idle static machine waits for days, and a job granted to it must not
            pause = min(pause, POLL_S)
        return max(self._clock.real_s(pause), PENDING_FLOOR_S)

    def _exchange(self) -> None:
        with self._lock:
            want, self._want = self._want, replace(self._want, progress=None)
            old_jobs = self._old_jobs
        facts = self._outbox.waiting()[: self._at_once]
        body = Sync(self._boot, want.ver, want.job, facts, want.progress, want.pending, old_jobs, self._again)
        try:
            reply = self._client.sync(body)
        except SyncRefusedError as error:
            self._refused(str(error), body)
            return
        except SyncError as error:
            self._again = self._again or bool(facts) or want.pending  # a lost poll of a member that trains told nothing
            self._log.once("sync", "sync.trouble", error=str(error))
            with self._lock:
                if self._want.progress is None:
                    self._want = replace(self._want, progress=want.progress)
            return
        self._log.over("sync", "sync.well")
        self._again = False
        self._outbox.delivered(facts)
        self._answered(old_jobs)
        self._go_on()
        if reply.doc is not None:
            self._stage = reply.doc.gen, reply.doc.state
        self._post(Answered(reply, old_jobs))

    def _answered(self, old_jobs: tuple[str, ...]) -> None:
        with self._lock:
            if self._old_jobs == old_jobs:
                self._old_jobs = ()

    def _refused(self, error: str, body: Sync) -> None:
        """Drop only the part of a request that caused a refusal, because a refused request blocks all later facts.

        The first refusal drops the progress and the fields that an older function may not know (``old_jobs``,
        ``again``). After further refusals, each fact is sent alone, and a fact that is refused alone is dropped.
        """
        facts, progress = body.facts, body.progress is not None
        self._log("sync.refused", error=error, facts=[fact.kind.value for fact in facts], progress=progress)
        if body.old_jobs or body.again:
            self._answered(body.old_jobs)
            self._again = False
        elif not progress and len(facts) > 1:
            self._at_once = 1
        elif not progress:
            self._outbox.delivered(facts)
        self._go_on()

    def _go_on(self) -> None:
        """Send waiting facts without a pause."""
        if self._outbox.waiting():
            self._wake.set()
        else:
            self._at_once = AT_ONCE
