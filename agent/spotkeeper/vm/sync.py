"""Talking with the function: one endpoint, a poll, and facts that are not lost.

Facts wait in a spool on disk until the function has answered for them; an agent that
died sends what is left at its next start. This file decides nothing: it carries.
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
from spotkeeper.spec import codec
from spotkeeper.spec.facts import Kind
from spotkeeper.spec.generation import FactIn, Progress, Sync, SyncReply
from spotkeeper.vm.events import Answered
from spotkeeper.vm.log import Log
from spotkeeper.vm.metadata import Metadata, MetadataError

POLL_S = 5.0  # virtual
PENDING_S = 0.5  # virtual, while anything is awaited, at first
PATIENCE = 0.05  # of the time that it has been awaited: what takes long is asked for less often
# On a fast clock a poll would cost more than the training beside it.
POLL_FLOOR_S = 0.5  # real
PENDING_FLOOR_S = 0.1  # real
PATH = "/v1/sync"
CONNECT_S = 3.0
ANSWER_S = 30.0  # a sync with new facts waits for a round with its cloud calls
AT_ONCE = 32  # facts; the function looks at no more of one sync
OF_THE_MACHINE = frozenset({Kind.NOTICE, Kind.REPRIEVE})


def pending_s(waited: float) -> float:
    """Until the next poll, while something has been awaited for so long. Virtual seconds.

    A gang that waits a minute for a machine to boot hears of it 1.5 s late on average, at half of the requests;
    one that waits an hour for capacity asks as often as one that trains.
    """
    return min(POLL_S, max(PENDING_S, PATIENCE * waited))


class SyncError(Exception):
    """No usable answer; the same is sent again."""


class RefusedError(SyncError):
    """The function read the request and will never take it (HTTP 400)."""


class FunctionClient:
    """``POST <function>/v1/sync`` as this machine. For one thread."""

    def __init__(self, url: str, metadata: Metadata) -> None:
        self._url = url
        self._metadata = metadata
        self._session = requests.Session()

    def sync(self, body: Sync) -> SyncReply:
        """One exchange.

        Raises:
            RefusedError: HTTP 400, the body makes no sense to the function.
            SyncError: anything else but an answer.
        """
        try:
            said = msgspec.json.encode(body)
            answer = self._session.post(
                self._url + PATH,
                data=said,
                headers=self._metadata.prove(self._url, PATH, said),
                timeout=(CONNECT_S, ANSWER_S),
            )
        except MetadataError as error:
            raise SyncError(str(error)) from None
        except requests.RequestException as error:
            raise SyncError(type(error).__name__) from None
        if answer.status_code in (401, 403):  # AWS refuses an old signature with 403
            self._metadata.forget_identity()
        if answer.status_code == 400:
            raise RefusedError(f"HTTP 400: {answer.text[:200]}")
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
    """Facts that the function has not answered for, in order; kept on disk. Thread-safe.

    Facts of another boot are dropped at start: they would be told as if this boot said them.
    """

    def __init__(self, folder: Path, boot: str, log: Log) -> None:
        self._path = folder / "facts.json"
        self._boot = boot
        self._log = log
        self._lock = threading.Lock()
        self._job: str | None = None
        self._facts: list[FactIn] = []
        self._told: set[FactIn] = set()
        with contextlib.suppress(OSError, msgspec.DecodeError):
            left = codec.decode(self._path.read_bytes(), _Spooled)
            if left.boot == boot:
                self._job, self._facts = left.job, list(left.facts)

    def assigned(self, job: str | None) -> None:
        """Another job or attempt: what was said for the old one may be said again, what waits is void.

        But what the cloud says of this machine is true whoever it serves, of no generation then.
        """
        with self._lock:
            if job != self._job:
                own = [replace(f, gen=0) if f.kind in OF_THE_MACHINE else f for f in self._facts]
                self._facts = [fact for fact in own if fact.attempt is not None or fact.kind in OF_THE_MACHINE]
            self._job = job
            self._told.clear()
            self._save()

    def add(self, fact: FactIn, *, again: bool = False) -> bool:
        """False where it waits already, or has been told and is not to be told ``again``."""
        with self._lock:
            if (fact in self._told and not again) or fact in self._facts:
                return False
            self._facts.append(fact)
            self._save()
            return True

    def waiting(self) -> tuple[FactIn, ...]:
        with self._lock:
            return tuple(self._facts)

    def told(self, facts: tuple[FactIn, ...]) -> None:
        with self._lock:
            self._told.update(facts)
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


class Want(Struct, frozen=True):
    """What the loop wants of the next exchanges."""

    ver: int = 0
    job: str | None = None
    pending: bool = True
    progress: Progress | None = None


class Syncer(threading.Thread):
    """Polls until told to stop; ``post`` gets an :class:`Answered` for every answer."""

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
        self._want = Want()
        self._at_once = AT_ONCE
        self._again = bool(outbox.waiting())  # the last exchange had no answer, or nobody knows whether it had one
        self._kept: tuple[str, ...] = ()
        self._awaited: tuple[tuple[int, str | None], float] | None = None  # what is awaited, since when (virtual)

    def say(self, fact: FactIn, *, again: bool = False) -> None:
        """Send a fact, now and until it has been taken. ``again``: with the next poll, though it has been taken."""
        if self._outbox.add(fact, again=again) and not again:
            self._log("fact", kind=fact.kind.value, gen=fact.gen, value=fact.value)
            self._wake.set()

    def assigned(self, job: str | None) -> None:
        self._outbox.assigned(job)

    def unsaid(self) -> int:
        return len(self._outbox.waiting())

    def ask(self, kept: tuple[str, ...]) -> None:
        """Ask once which of these jobs are over; the :class:`Answered` says of which it was asked."""
        with self._lock:
            self._kept = kept

    def want(self, ver: int, job: str | None, pending: bool, progress: Progress | None = None) -> None:
        """Becoming pending, or having progress, does not wait for the end of a long pause."""
        with self._lock:
            hurry = pending and not self._want.pending
            self._want = Want(ver, job, pending, progress or self._want.progress)
        if hurry:
            self._wake.set()

    def run(self) -> None:
        while True:
            self._exchange()
            if self._wake.wait(self._pause_s()):
                self._wake.clear()

    def _pause_s(self) -> float:
        """Real seconds until the next poll. Another document, or another job, is another wait."""
        with self._lock:
            want = self._want
        if not want.pending:
            self._awaited = None
            return max(self._clock.real_s(POLL_S), POLL_FLOOR_S)
        what, now = (want.ver, want.job), self._clock.now()
        if self._awaited is None or self._awaited[0] != what:
            self._awaited = what, now
        return max(self._clock.real_s(pending_s(now - self._awaited[1])), PENDING_FLOOR_S)

    def _exchange(self) -> None:
        with self._lock:
            want, self._want = self._want, replace(self._want, progress=None)
            kept = self._kept
        facts = self._outbox.waiting()[: self._at_once]
        body = Sync(self._boot, want.ver, want.job, facts, want.progress, want.pending, kept, self._again)
        try:
            reply = self._client.sync(body)
        except RefusedError as error:
            self._refused(str(error), body)
            return
        except SyncError as error:
            self._again = True
            self._log.once("sync", "sync.trouble", error=str(error))
            with self._lock:
                if self._want.progress is None:
                    self._want = replace(self._want, progress=want.progress)
            return
        self._log.over("sync", "sync.well")
        self._again = False
        self._outbox.told(facts)
        self._answered(kept)
        self._go_on()
        self._post(Answered(reply, kept))

    def _answered(self, kept: tuple[str, ...]) -> None:
        with self._lock:
            if self._kept == kept:
                self._kept = ()

    def _refused(self, error: str, body: Sync) -> None:
        """Said again it would be refused again, and hold up the facts behind it; so what is wrong goes, and no more.

        First what an older function does not know and can be done without: the question, and that it is said again.
        Then the progress, which ``_exchange`` has taken. Then the facts go one by one.
        """
        facts, progress = body.facts, body.progress is not None
        self._log("sync.refused", error=error, facts=[fact.kind.value for fact in facts], progress=progress)
        if body.kept or body.again:
            self._answered(body.kept)
            self._again = False
        elif not progress and len(facts) > 1:
            self._at_once = 1
        elif not progress:
            self._outbox.told(facts)
        self._go_on()

    def _go_on(self) -> None:
        """What still waits does not wait for the end of a pause."""
        if self._outbox.waiting():
            self._wake.set()
        else:
            self._at_once = AT_ONCE
