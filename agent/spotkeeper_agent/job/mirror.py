"""Decides when this machine copies a committed checkpoint to the bucket, and when it fetches one.

Only the loop's thread may call this module; a separate helper thread transfers the data (``mirror_transfer.py``). A
save, a stop or a notice interrupts a copy, which continues later: no job needs its copies soon, since a checkpoint's
disk outlives its machine. Only a gang that moves by the bucket waits for its last checkpoint's copy
(``Generation.upload``), which is therefore not limited in speed. The function knows which copies exist, orders fetches,
and deletes old copies.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

from spotkeeper.clock import Clock
from spotkeeper.contract.facts import BucketCopy, Kind
from spotkeeper.contract.generation import DocState, FetchOrder, Generation, MirrorRun, SyncReply
from spotkeeper.train.agent_link.control import Commit, Fault
from spotkeeper_agent.cloud.storage import Bucket
from spotkeeper_agent.core.events import Event, Failed, Fetched, Helped, HelperThread, MirrorThere, NoCopy, Unfit
from spotkeeper_agent.core.log import Log
from spotkeeper_agent.core.state import AgentState, MachineState
from spotkeeper_agent.host.disk import DiskError, Why
from spotkeeper_agent.host.mounting import Mounting
from spotkeeper_agent.job.mirror_transfer import CheckpointDownload, CheckpointUpload, NoCopyError, RottenError, Source
from spotkeeper_agent.job.supervisor import Child

UP, DOWN = "mirror", "fetch"
PATIENCE_S = 900.0  # virtual; a fetch fails if it receives no byte for this long
PATIENCE_FLOOR_S = 5.0  # real; lower limit of ``PATIENCE_S``
PAUSE_MOST_S = 60.0  # real; longest pause between two tries of an upload


class Mirroring:
    """One machine's copies of checkpoints."""

    def __init__(self, bucket: Bucket, helper: HelperThread, clock: Clock, log: Log) -> None:
        self.helper = helper
        self._bucket, self._clock, self._log = bucket, clock, log
        self._upload: CheckpointUpload | None = None
        self._trouble = (0, 0.0)  # failed tries of the upload; earliest time of the next one (monotonic)
        self._download: CheckpointDownload | None = None
        self._moved = (0, 0.0)  # bytes that had arrived, and when (steady)
        self._order: FetchOrder | None = None
        self._known: tuple[Commit | None, float | None] = (None, None)  # the newest copy, and since when (virtual)
        self._tried: Commit | None = None  # the last checkpoint copied here, or found damaged
        self._turn = -1  # the last interval of ``every_s`` in which a copy began here

    def told(self, reply: SyncReply) -> None:
        """Process a reply: which copy is the newest, and which one to fetch."""
        self._order = reply.fetch
        self._known = Commit.parse(reply.mirrored or ""), reply.mirrored_at

    def advance(self, machine: MachineState, child: Child | None, mounting: Mounting) -> None:
        """Compare the wanted copies with the running transfers, and take the next steps."""
        self._copy(machine, child, mounting)
        self._fetch(machine, child, mounting)

    def helped(self, event: Helped, machine: MachineState, mounting: Mounting) -> None:
        """Handle the event with which the helper thread's work has ended."""
        match event:
            case MirrorThere():
                self._sent(event, machine)
            case Unfit():
                self._unfit(event)
            case Fetched():
                self._fetched(event, machine, mounting)
            case NoCopy():
                self._unavailable(event, machine)
            case Failed("mirror"):
                self._not_sent()
            case Failed(_, error, why):
                self._not_fetched(error, why, machine)

    # ------------------------------------------------------------------ to the bucket

    def _copy(self, machine: MachineState, child: Child | None, mounting: Mounting) -> None:
        run, doc = machine.saved.run, machine.doc
        want = run.mirror if run is not None else None
        full = child is not None and child.control.fault is Fault.DISK_FULL
        if want is None or doc is None or full or mounting.number is None or not _copies(doc, machine.node):
            self._give_up()
            return
        commit = mounting.newest if child is None else child.control.commit
        if doc.upload and child is None and self._upload is not None and self._upload.commit != commit:
            self._give_up()  # of an older checkpoint
        if not _undisturbed(machine, doc, child):
            if self._upload is not None:
                self._upload.stop.set()  # parts in the bucket stay, and a later try continues there
        elif self._upload is None:
            self._begin(machine, commit, want, doc, at_once=child is None)
        elif not self.helper.busy(UP) and time.monotonic() >= self._trouble[1]:
            self._upload.stop.clear()
            self._send(self._upload)

    def _begin(
        self, machine: MachineState, commit: Commit | None, want: MirrorRun, doc: Generation, *, at_once: bool
    ) -> None:
        """Begin to copy the newest checkpoint: once per interval, and at once if the job waits for that.

        Intervals begin at the same time on all nodes, so that all nodes choose the same checkpoint.
        """
        now = self._clock.now()
        turn, (known, known_at) = int(now // want.every_s), self._known
        early = turn == self._turn or (known_at is not None and turn <= int(known_at // want.every_s))
        if (
            commit is None
            or (early and not at_once)
            or commit == self._tried
            or (known is not None and commit <= known)
        ):
            return
        if machine.job is None:
            return
        try:
            source = Source(machine.ckpt(machine.job), commit, machine.node, replicated=doc.replicated)
        except (OSError, ValueError) as error:  # a newer checkpoint has replaced it, or will
            self._log.once(f"mirror.source {commit}", "mirror.source", commit=str(commit), error=str(error))
            return
        self._turn = turn
        rate = math.inf if doc.upload else want.bytes_s
        self._upload = CheckpointUpload(self._bucket, machine.job, machine.node, source, rate)
        self._log("mirror.begin", commit=str(commit))
        self._send(self._upload)

    def _send(self, upload: CheckpointUpload) -> None:
        def send() -> Event:
            try:
                return upload.work()
            except RottenError as error:
                return Unfit(upload.commit, str(error))

        self.helper.do(UP, send)

    def _sent(self, event: MirrorThere, machine: MachineState) -> None:
        if self._upload is not None and self._upload.commit == event.commit:
            self._log("mirror.there", commit=str(event.commit), complete=event.complete)
            self._tried, self._trouble = event.commit, (0, 0.0)
            if event.complete:
                machine.say(Kind.MIRRORED, str(BucketCopy(str(event.commit), event.bytes)))
            self._give_up()

    def _unfit(self, event: Unfit) -> None:
        """Do not copy a damaged checkpoint; the next checkpoint is tried."""
        self._log("mirror.unfit", commit=str(event.commit), why=event.why)
        self._tried, self._turn = event.commit, -1
        self._give_up()

    def _not_sent(self) -> None:
        """Handle a failed upload; the pause before the next try doubles."""
        if self._upload is not None and not self._upload.stop.is_set():
            tries = self._trouble[0] + 1
            self._trouble = tries, time.monotonic() + min(PAUSE_MOST_S, 2.0**tries)

    def _give_up(self) -> None:
        if self._upload is not None:
            self._upload.close()
            self._upload = None

    # ------------------------------------------------------------------ from the bucket

    def _fetch(self, machine: MachineState, child: Child | None, mounting: Mounting) -> None:
        order = self._order
        commit = None if order is None else Commit.parse(order.commit)
        if order is None or commit is None or child is not None or mounting.number is None or machine.job is None:
            self._leave_fetch()
            return
        if self._download is None or self._download.commit != commit:
            self._leave_fetch()
            if self.helper.busy(DOWN):
                return
            self._download = CheckpointDownload(
                self._bucket, machine.job, commit, order.source, machine.ckpt(machine.job)
            )
            self._moved = 0, self._clock.steady()
            self._log("fetch.begin", commit=order.commit)
        if not self._download.over:
            self._receive(self._download, machine.ckpt(machine.job))

    def _receive(self, download: CheckpointDownload, ckpt: Path) -> None:
        def receive() -> Event:
            try:
                ckpt.mkdir(parents=True, exist_ok=True)
                return download.work()
            except NoCopyError as error:
                return NoCopy(download.commit, str(error))
            except OSError as error:  # the disk's: the bucket raises StorageError
                raise DiskError(f"{ckpt}: {error}", Why.WRITE) from None

        self.helper.do(DOWN, receive)

    def _fetched(self, event: Fetched, machine: MachineState, mounting: Mounting) -> None:
        if self._download is not None and self._download.commit == event.commit:
            self._log("fetch.there", commit=str(event.commit))
            self._download.over = True
            machine.say(Kind.FETCHED, str(BucketCopy(str(event.commit), event.bytes)))
            mounting.wrote(event.commit, machine.gen)

    def _unavailable(self, event: NoCopy, machine: MachineState) -> None:
        if self._download is not None and self._download.commit == event.commit:
            self._log("fetch.nothing", commit=str(event.commit), why=event.why)
            self._download.over = True
            machine.say(Kind.UNMIRRORED, str(event.commit))

    def _not_fetched(self, error: str, why: Why | None, machine: MachineState) -> None:
        """Handle a failed fetch. If no byte arrives for :data:`PATIENCE_S` seconds, report the copy as unavailable."""
        download, now = self._download, self._clock.steady()
        if download is None or why is not None:
            return
        if download.count > self._moved[0]:
            self._moved = download.count, now
        patience = max(self._clock.real_s(PATIENCE_S), PATIENCE_FLOOR_S)
        if self._clock.real_s(now - self._moved[1]) > patience:
            self._unavailable(NoCopy(download.commit, f"no data for {PATIENCE_S / 60:.0f} minutes: {error}"), machine)

    def _leave_fetch(self) -> None:
        if self._download is not None:
            self._download.stop.set()
            self._download = None

    # ------------------------------------------------------------------ the end

    def stop(self) -> bool:
        """Stop upload and download; return True once neither uses the disk."""
        self._give_up()
        self._leave_fetch()
        return not (self.helper.busy(UP) or self.helper.busy(DOWN))

    def forget_job(self) -> None:
        self.stop()
        self._order, self._known, self._tried, self._turn = None, (None, None), None, -1


def _copies(doc: Generation, node: int) -> bool:
    """Whether this node uploads copies: with sharded state every node with a disk, otherwise the lowest such node."""
    writers = [member.node for member in doc.members if member.disk]
    return node in writers and (not doc.replicated or node == min(writers))


def _undisturbed(machine: MachineState, doc: Generation, child: Child | None) -> bool:
    """Whether an upload delays nothing, or others wait for it.

    The job trains; or a trial of a search has ended its generation at its rung, and its machines go once its checkpoint
    is copied; or the gang has saved and stopped for a move by the bucket.
    """
    if doc.upload and child is None and machine.saved.ended == doc.gen:
        return True
    if doc.state not in (DocState.RUN, DocState.ROLL_CALL) or machine.saved.notice is not None:
        return False
    if child is not None:
        return not child.saving and machine.state is AgentState.RUNNING
    run = machine.saved.run
    return run is not None and run.until is not None and machine.saved.ended == doc.gen
