"""This rank's end of the saver: stage, ask, hear. One rank per node has one that writes.

A save that fails never stops training: it is told (control file, stderr), the older
checkpoint stays, and the next save is tried as if nothing had been.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from spotkeeper.train.checkpoint import Image, State
from spotkeeper.train.client import Client, Durable, Event, Failed, Hello, SaverError, Written
from spotkeeper.train.control import Commit, Control, Fault
from spotkeeper.train.messages import Stretch
from spotkeeper.train.node import Offer
from spotkeeper.train.pace import Pace
from spotkeeper.train.settings import Settings
from spotkeeper.train.store import Manifest

_START_S = 5.0  # the agent may be starting the saver at this moment


def say(text: str) -> None:
    """A line for whoever reads the job's log."""
    print(f"spotkeeper: {text}", file=sys.stderr, flush=True)


class Writer:
    """``folder`` None: this rank writes nothing, and every method is a no-op."""

    def __init__(self, settings: Settings, folder: Path | None, control: Control, pace: Pace) -> None:
        self._settings = settings
        self._folder = folder
        self._control = control
        self._pace = pace
        self._gen = -1
        self._client: Client | None = None
        self._asked = 0  # the agent's request that the save under way answers
        self._began = 0.0
        self.commit: Commit | None = None
        self.written: Manifest | None = None  # this node's part of a checkpoint that is not complete yet

    @property
    def writes(self) -> bool:
        return self._folder is not None

    @property
    def busy(self) -> bool:
        return self._client is not None and self._client.pending is not None

    @property
    def client(self) -> Client | None:
        return self._client

    def greet(self, gen: int) -> Hello | None:
        """Connect and announce the generation; waits for a save of an older one.

        Raises:
            RuntimeError: a newer generation runs on this node, so this one must not.
        """
        self._gen = gen
        try:
            return self._connect(_START_S)
        except SaverError as error:
            if error.fault is Fault.FENCED:
                raise RuntimeError(f"generation {gen} is over: {error}") from None
            self._tell(error.fault, str(error))
            return None

    def _connect(self, timeout_s: float) -> Hello | None:
        if self._folder is None:
            return None
        client = Client.connect(self._settings.saver, timeout_s) if self._settings.saver else Client.private()
        try:
            hello = client.hello(self._folder, self._gen, self._settings.keep)
        except SaverError:
            client.close()
            raise
        self._client = client
        for skipped in hello.quarantined:
            say(f"quarantined {skipped}")
        return hello

    def has(self, manifest: Manifest) -> None:
        """This node's disk has a checkpoint that the run has begun from."""
        self.commit = manifest.commit
        self._control.committed(manifest.commit, manifest.saved_at)

    def adopt(self, folder: Path) -> None:
        """The disk came late: write there from now on."""
        self._folder = folder
        try:
            self._connect(0.0)
        except SaverError as error:
            self.lose(error)

    def warm(self, size: int) -> None:
        """Have memory made ready, while training goes on."""
        try:
            if self._client is not None:
                self._client.reserve(size)
        except SaverError as error:
            self.lose(error)

    def save(self, state: State, manifest: Manifest) -> None:
        """Stage and ask; returns when the state may change again."""
        if not self.begin(manifest.commit):
            return
        image = Image(state)
        if (staged := self.stage(image.size)) is not None:
            image.copy_to(staged[1])
            self.request(manifest, image.stretches)

    def begin(self, commit: Commit) -> bool:
        """A save of it is due: whether this rank can write it, and need."""
        if self._folder is None:
            return False
        self._asked, self._began = self._control.ask, time.monotonic()
        if commit == self.commit:  # this very state is durable already
            self._control.answered = max(self._control.answered, self._asked)
            return False
        try:
            if self._client is None:
                self._connect(0.0)  # it was lost: the agent, or this, starts another; the loop does not wait for it
        except SaverError as error:
            self.lose(error)
        return self._client is not None

    def stage(self, size: int) -> tuple[Offer, memoryview] | None:
        """Memory to be written to; None where there is none."""
        try:
            if self._client is not None:
                memory = self._client.stage(size)
                return Offer(os.getpid(), self._client.fd, len(memory)), memoryview(memory)
        except SaverError as error:
            self.lose(error)
        return None

    def request(self, manifest: Manifest, stretches: tuple[Stretch, ...], *, part: bool = False) -> None:
        """Have what was staged made durable."""
        try:
            if self._client is not None:
                self._client.save(manifest, stretches, part=part)
        except SaverError as error:
            self.lose(error)

    def publish(self, manifest: Manifest) -> None:
        """All nodes have written their parts."""
        self.written = None
        try:
            if self._client is not None:
                self._client.publish(manifest)
        except SaverError as error:
            self.lose(error)

    def fail(self, commit: Commit, why: str) -> None:
        """A save came to nothing for a reason that lies elsewhere."""
        self.written = None
        self._tell(Fault.WRITE_FAILED, f"checkpoint {commit} was not saved: {why}")

    def copy(self, manifest: Manifest, stretches: tuple[Stretch, ...]) -> None:
        """Make a checkpoint durable that a peer sent into the staging memory."""
        try:
            if self._client is not None:
                self._began = time.monotonic()
                self._client.save(manifest, stretches)
        except SaverError as error:
            self.lose(error)

    def poll(self) -> None:
        """Hear of the end of a save. About a microsecond."""
        if self._client is not None and self._client.pending is not None:
            try:
                self._hear(self._client.poll())
            except SaverError as error:
                self.lose(error)

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is being written, or ``timeout_s`` have passed."""
        if self._client is not None and self._client.pending is not None:
            try:
                self._hear(self._client.wait(timeout_s))
            except SaverError as error:
                self.lose(error)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _hear(self, event: Event | None) -> None:
        if isinstance(event, Durable):
            self._pace.saves.append(time.monotonic() - self._began)
            self.commit = max(event.commit, self.commit or event.commit)
            self._control.committed(self.commit)
            self._control.save_s = self._pace.save_s
            self._control.fault = Fault.NONE
            self._control.answered = max(self._control.answered, self._asked)
        elif isinstance(event, Written):
            self.written = event.manifest
        elif isinstance(event, Failed):
            self._tell(event.fault, f"checkpoint {event.commit} was not saved: {event.why}")

    def lose(self, error: SaverError) -> None:
        """A request came to nothing: told, and tried anew with the next save."""
        self._tell(error.fault, str(error))
        if error.fault is Fault.SAVER_LOST and self._client is not None:
            self._client.close()
            self._client = None

    def _tell(self, fault: Fault, why: str) -> None:
        self._control.fault = fault
        kept = f"; {self.commit} stays the newest" if self.commit else ""
        say(f"{fault.name.lower().replace('_', ' ')}: {why}{kept}; training goes on")
