"""Copies of committed checkpoints in the bucket: when one is made here, and when one is fetched, as the job asks for.

For the loop's thread; a helper of its own reads and sends (``mirror_up.py``), or fetches (``mirror_down.py``). A copy
never holds up a save, a stop or a notice: it is broken off, and goes on when all is calm again. A disk outlives its
machine, so no copy is ever what saves a job in a hurry. Which copies there are, and which is to be fetched, the
function says; what may go, it deletes.
"""

from __future__ import annotations

import time
from pathlib import Path

from spotkeeper.clock import Clock
from spotkeeper.spec.facts import Kind
from spotkeeper.spec.generation import DocState, FetchOrder, Generation, MirrorRun, SyncReply
from spotkeeper.train.control import Commit, Fault
from spotkeeper.vm.disk import DiskError, Why
from spotkeeper.vm.events import Event, Failed, Fetched, Helped, MirrorThere, NoCopy, Unfit
from spotkeeper.vm.helper import Helper
from spotkeeper.vm.log import Log
from spotkeeper.vm.mirror_down import Download, NoCopyError
from spotkeeper.vm.mirror_up import RottenError, Source, Upload
from spotkeeper.vm.mounting import Mounting
from spotkeeper.vm.standing import Standing, State
from spotkeeper.vm.storage import Bucket
from spotkeeper.vm.supervisor import Child

UP, DOWN = "mirror", "fetch"
PATIENCE_S = 900.0  # virtual; a fetch without a byte that came through
PATIENCE_FLOOR_S = 5.0  # real
PAUSE_MOST_S = 60.0  # real, between two tries of an upload


class Mirroring:
    """One machine's part in it."""

    def __init__(self, bucket: Bucket, helper: Helper, clock: Clock, log: Log) -> None:
        self.helper = helper
        self._bucket, self._clock, self._log = bucket, clock, log
        self._upload: Upload | None = None
        self._trouble = (0, 0.0)  # tries of the upload that were in vain, and when the next one may be (monotonic)
        self._download: Download | None = None
        self._moved = (0, 0.0)  # bytes of the download that came through, and since when (steady)
        self._order: FetchOrder | None = None
        self._known: tuple[Commit | None, float | None] = (None, None)  # the newest copy, and since when (virtual)
        self._tried: Commit | None = None  # copied here, or not fit for it
        self._turn = -1  # the last stretch of ``every_s`` in which a copy was begun here

    def told(self, reply: SyncReply) -> None:
        """What the function knows of copies, and what it wants here."""
        self._order = reply.fetch
        self._known = Commit.parse(reply.mirrored or ""), reply.mirrored_at

    def advance(self, me: Standing, child: Child | None, mounting: Mounting) -> None:
        """Compare what is wanted with what is under way."""
        self._copy(me, child, mounting)
        self._fetch(me, child, mounting)

    def helped(self, event: Helped, me: Standing, mounting: Mounting) -> None:
        """The helper's thread has done a piece of work, or failed at it."""
        match event:
            case MirrorThere():
                self._sent(event, me)
            case Unfit():
                self._unfit(event)
            case Fetched():
                self._fetched(event, me, mounting)
            case NoCopy():
                self._no_copy(event, me)
            case Failed("mirror", error, _):
                self._not_sent(error)
            case Failed(_, error, why):
                self._not_fetched(error, why, me)

    # ------------------------------------------------------------------ to the bucket

    def _copy(self, me: Standing, child: Child | None, mounting: Mounting) -> None:
        run, doc = me.saved.run, me.doc
        want = run.mirror if run is not None else None
        full = child is not None and child.control.fault is Fault.DISK_FULL
        if want is None or doc is None or full or mounting.number is None or not _copies(doc, me.rank):
            self._give_up()
        elif child is None or child.saving or not _calm(me, doc):
            if self._upload is not None:
                self._upload.stop.set()  # what has arrived stays; it goes on from there
        elif self._upload is None:
            self._begin(me, child, want, doc)
        elif not self.helper.busy(UP) and time.monotonic() >= self._trouble[1]:
            self._upload.stop.clear()
            self._send(self._upload)

    def _begin(self, me: Standing, child: Child, want: MirrorRun, doc: Generation) -> None:
        """The newest checkpoint, once in each stretch of time: so all ranks choose the same one, without a word."""
        commit, now = child.control.commit, self._clock.now()
        turn, (known, known_at) = int(now // want.every_s), self._known
        early = turn == self._turn or (known_at is not None and turn <= int(known_at // want.every_s))
        if commit is None or early or commit == self._tried or (known is not None and commit <= known):
            return
        if me.job is None:
            return
        try:
            source = Source(me.ckpt(me.job), commit, me.rank, replicated=doc.replicated)
        except (OSError, ValueError) as error:  # a newer one has taken its place, or follows
            self._log.once(f"mirror.source {commit}", "mirror.source", commit=str(commit), error=str(error))
            return
        self._turn = turn
        self._upload = Upload(self._bucket, me.job, me.rank, source, want.bytes_s)
        self._log("mirror.begin", commit=str(commit))
        self._send(self._upload)

    def _send(self, upload: Upload) -> None:
        def send() -> Event:
            try:
                return upload.work()
            except RottenError as error:
                return Unfit(upload.commit, str(error))

        self.helper.do(UP, send)

    def _sent(self, event: MirrorThere, me: Standing) -> None:
        self.helper.done(UP)
        if self._upload is not None and self._upload.commit == event.commit:
            self._log("mirror.there", commit=str(event.commit), complete=event.complete)
            self._tried, self._trouble = event.commit, (0, 0.0)
            if event.complete:
                me.say(Kind.MIRRORED, str(event.commit))
            self._give_up()

    def _unfit(self, event: Unfit) -> None:
        """The next checkpoint is tried."""
        self.helper.done(UP)
        self._log("mirror.unfit", commit=str(event.commit), why=event.why)
        self._tried, self._turn = event.commit, -1
        self._give_up()

    def _not_sent(self, error: str) -> None:
        """Tried ever more seldom: a bucket that refuses would be asked every second else."""
        self.helper.done(UP, error)
        if self._upload is not None and not self._upload.stop.is_set():
            tries = self._trouble[0] + 1
            self._trouble = tries, time.monotonic() + min(PAUSE_MOST_S, 2.0**tries)

    def _give_up(self) -> None:
        if self._upload is not None:
            self._upload.close()
            self._upload = None

    # ------------------------------------------------------------------ from the bucket

    def _fetch(self, me: Standing, child: Child | None, mounting: Mounting) -> None:
        order = self._order
        commit = None if order is None else Commit.parse(order.commit)
        if order is None or commit is None or child is not None or mounting.number is None or me.job is None:
            self._leave_fetch()
            return
        if self._download is None or self._download.commit != commit:
            self._leave_fetch()
            if self.helper.busy(DOWN):
                return
            self._download = Download(self._bucket, me.job, commit, order.source, me.ckpt(me.job))
            self._moved = 0, self._clock.steady()
            self._log("fetch.begin", commit=order.commit)
        if not self._download.over:
            self._receive(self._download, me.ckpt(me.job))

    def _receive(self, download: Download, ckpt: Path) -> None:
        def receive() -> Event:
            try:
                ckpt.mkdir(parents=True, exist_ok=True)
                return download.work()
            except NoCopyError as error:
                return NoCopy(download.commit, str(error))
            except OSError as error:  # of the disk: the bucket's are other errors
                raise DiskError(f"{ckpt}: {error}", Why.WRITE) from None

        self.helper.do(DOWN, receive)

    def _fetched(self, event: Fetched, me: Standing, mounting: Mounting) -> None:
        self.helper.done(DOWN)
        if self._download is not None and self._download.commit == event.commit:
            self._log("fetch.there", commit=str(event.commit))
            self._download.over = True
            me.say(Kind.FETCHED, str(event.commit))
            mounting.wrote(event.commit, me.gen)

    def _no_copy(self, event: NoCopy, me: Standing) -> None:
        self.helper.done(DOWN)
        if self._download is not None and self._download.commit == event.commit:
            self._log("fetch.nothing", commit=str(event.commit), why=event.why)
            self._download.over = True
            me.say(Kind.UNMIRRORED, str(event.commit))

    def _not_fetched(self, error: str, why: Why | None, me: Standing) -> None:
        """A try was in vain. A bucket that gives nothing for long has no copy; a disk in trouble says nothing of it."""
        self.helper.done(DOWN, error)
        download, now = self._download, self._clock.steady()
        if download is None or why is not None:
            return
        if download.count > self._moved[0]:
            self._moved = download.count, now
        patience = max(self._clock.real_s(PATIENCE_S), PATIENCE_FLOOR_S)
        if self._clock.real_s(now - self._moved[1]) > patience:
            self._no_copy(NoCopy(download.commit, f"nothing came for {PATIENCE_S / 60:.0f} minutes: {error}"), me)

    def _leave_fetch(self) -> None:
        if self._download is not None:
            self._download.stop.set()
            self._download = None

    # ------------------------------------------------------------------ the end

    def let_go(self) -> bool:
        """True once nothing here uses the disk."""
        self._give_up()
        self._leave_fetch()
        return not (self.helper.busy(UP) or self.helper.busy(DOWN))

    def forget_job(self) -> None:
        self.let_go()
        self._order, self._known, self._tried, self._turn = None, (None, None), None, -1


def _copies(doc: Generation, rank: int) -> bool:
    """Of replicated state the lowest rank that writes; of sharded state everybody who does."""
    writers = [member.rank for member in doc.members if member.disk]
    return rank in writers and (not doc.replicated or rank == min(writers))


def _calm(me: Standing, doc: Generation) -> bool:
    quiet = doc.state in (DocState.RUN, DocState.ROLL_CALL) and me.state is State.RUNNING
    return quiet and me.saved.notice is None
