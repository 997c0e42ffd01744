"""The trainer's side of a save: the requests to the saver. One rank per node writes.

A failed save never stops training: the control file and stderr report the failure, the older checkpoint stays, and the
next save is tried as usual.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from spotkeeper.train.agent_link.control import AgentRequest, Commit, Control, Fault, RunPhase
from spotkeeper.train.checkpoint.client import Client
from spotkeeper.train.checkpoint.durable import MemoryHandle
from spotkeeper.train.checkpoint.image import Image, RunState
from spotkeeper.train.checkpoint.manifest import Manifest
from spotkeeper.train.checkpoint.protocol import (
    IMAGES,
    Event,
    PartWritten,
    SaveDurable,
    SaveFailed,
    SaverError,
    SaverSilentError,
    SaverState,
    Stretch,
)
from spotkeeper.train.checkpoint.seal import break_seal, seal
from spotkeeper.train.checkpoint.snapshot import BackgroundCopier
from spotkeeper.train.checkpoint.store import STATE, complete, partial
from spotkeeper.train.core.errors import say
from spotkeeper.train.core.pace import SavePace
from spotkeeper.train.core.settings import RunSettings
from spotkeeper.train.core.tree import LayoutCache

_RECONNECT_S = 5.0  # pause between two tries to reach a new saver for images
_START_S = 5.0  # time for the agent to start the saver
# Whoever requests a stop waits 10 s. So a silent saver gets _STOP_S seconds. The next try, with a new saver or the same
# one, gets _STOP_AGAIN_S.
_STOP_S = 6.0
_STOP_AGAIN_S = 1.0


class CheckpointWriter:
    """One rank's requests to the saver. If ``folder`` is None, this rank writes nothing and the methods do nothing."""

    def __init__(self, settings: RunSettings, folder: Path | None, control: Control, pace: SavePace) -> None:
        self._settings = settings
        self._folder = folder
        self._control = control
        self._pace = pace
        self._gen = -1
        self._client: Client | None = None
        self._asked = 0  # number of the agent's request to which the running save belongs
        self._began = 0.0
        self._silent = False  # whether a saver was given up as silent since the stop request
        self._images_off = False  # the saver has refused memory for images, or they cannot be sealed
        self._limited = False  # whether it was said that there is no third image memory
        self._tried = -math.inf  # when a new saver was last looked for
        self._layouts = LayoutCache()
        self.failed = False  # the last save failed
        self.commit: Commit | None = None
        self.written: Manifest | None = None  # this node's part of an incomplete checkpoint

    @property
    def writes(self) -> bool:
        return self._folder is not None

    @property
    def busy(self) -> bool:
        return self._client is not None and self._client.pending is not None

    @property
    def stalls(self) -> deque[float]:
        """Seconds that saves stopped the loop."""
        return self._pace.stalls

    @property
    def client(self) -> Client | None:
        return self._client

    def greet(self, gen: int) -> SaverState | None:
        """Connect and announce the generation. Waits for a running save of an older generation.

        Raises:
            RuntimeError: a newer generation runs on this node.
        """
        self._gen = gen
        try:
            return self._connect(_START_S)
        except SaverError as error:
            if error.fault is Fault.FENCED:
                raise RuntimeError(f"generation {gen} is over: {error}") from None
            self._tell(error.fault, str(error))
            return None

    def _connect(self, timeout_s: float) -> SaverState | None:
        if self._folder is None:
            return None
        path, limit = self._settings.saver, self._silence_s
        client = Client.connect(path, timeout_s, limit) if path else Client.private(limit)
        try:
            hello = client.hello(self._folder, self._gen, self._settings.keep)
        except SaverError:
            client.close()
            raise
        self._client, self._images_off, self._limited = client, False, False
        for skipped in hello.quarantined:
            say(f"quarantined {skipped}")
        staged = hello.staged
        if staged is not None and staged.commit.gen == self._gen and STATE in {file.name for file in staged.files}:
            self.has(staged)  # the saver has written it because the connection before this one was lost
        return hello

    def _silence_s(self) -> float | None:
        """Return how many seconds the saver may be silent: few after a stop request; otherwise None, the default."""
        control = self._control
        if control.requested is not AgentRequest.SAVE_STOP and control.state is not RunPhase.STOPPING:
            return None
        return _STOP_AGAIN_S if self._silent else _STOP_S

    def has(self, manifest: Manifest) -> None:
        """Note that this node's disk has this checkpoint, from which the run started or which is of this run."""
        self.commit = manifest.commit
        self._control.committed(manifest.commit, manifest.saved_at)

    def adopt(self, folder: Path) -> None:
        """Write to ``folder`` from now on. Called if the node's disk is mounted only after the run's start."""
        self._folder = folder
        with self._reporting():
            self._connect(0.0)

    def own_offer(self) -> None:
        """Begin to copy what optimizers keep of an image in the saver's memory."""
        if self._client is not None:
            self._client.own_offer()

    def warm(self, size: int, *, images: bool = False) -> None:
        """Request memory while training continues: for the first image, or for saves that are no images."""
        with self._reporting():
            if self._client is None:
                return
            if images:
                self._client.images.open(0, size)
            else:
                self._client.reserve(size)

    def save(
        self,
        state: RunState,
        manifest: Manifest,
        copier: BackgroundCopier | None = None,
        owned: Iterable[tuple[str, torch.Tensor]] = (),
    ) -> None:
        """Stage and request a save. Returns when the state may change again.

        With a ``copier``, the tensors ``owned`` may change only in their optimizers' next step: the copier still copies
        them in the background, and that step waits for it.
        """
        if not self.begin(manifest.commit):
            return
        if copier is not None and self.image(state, manifest, copier, owned, save=True):
            return
        image = Image(state, cache=self._layouts)
        if (staged := self.stage(image.size)) is None:
            return

        def complete() -> None:
            if why := image.finish(memory):
                self.discard(manifest.commit, why)
            else:
                self.request(manifest, image.stretches)

        memory = staged[1]
        if copier is None or not (later := copier.select(owned)):
            image.copy_to(memory)
            complete()
        else:
            left = image.copy_to(memory, later=later)
            copier.begin(left, complete, lambda why: self.discard(manifest.commit, why), self._pace.stalls)

    @property
    def images(self) -> bool:
        """Whether this rank keeps images."""
        return self._client is not None and not self._images_off

    def next_image(self) -> int | None:
        """Return the number of the memory that the next image fills, or None if there is none at the moment.

        Connects to a new saver if the last one is gone, but only now and then.
        """
        now = time.monotonic()
        if self._client is None and self._folder is not None and now - self._tried >= _RECONNECT_S:
            self._tried = now
            with contextlib.suppress(SaverError):
                self._connect(0.0)
        with self._reporting():
            if self._client is not None and not self._images_off:
                return self._client.next_image()
        return None

    def image(
        self,
        state: RunState,
        manifest: Manifest,
        copier: BackgroundCopier,
        owned: Iterable[tuple[str, torch.Tensor]],
        *,
        save: bool = False,
    ) -> bool:
        """Copy the state into an image memory and seal it. Return False if no memory is there.

        With ``save``, the saver then writes the image to disk; a memory that is being allocated is waited for.
        """
        client = self._client
        if client is None or self._images_off or (number := client.images.next()) is None:
            return False
        image = Image(state, cache=self._layouts)
        size = image.size  # before it is complete: the next image may need room for as much
        try:
            memory = client.image(number, size, wait=save)
        except SaverError as error:
            self._no_images(error)
            return False
        self._say_limited(client)
        if memory is None:
            return False

        def complete() -> None:
            if self._client is not client:  # the saver was lost; another one may have given the memory to another image
                return
            if why := image.finish(memory):
                discard(why)
                return
            if not seal(memory, manifest, image.stretches):
                self._no_images(SaverError(Fault.WRITE_FAILED, "the gang is too large for an image's seal"))
                discard("an image's seal has no room for so many ranks")
                return
            client.images.newest = number
            if save:
                with self._reporting():
                    for each in range(IMAGES):  # now, since the saver answers no request while it writes
                        client.images.open(each, size)
                    client.save(manifest, image.stretches, image=number)
            elif (following := client.images.next()) is not None:
                try:
                    client.images.open(following, size)  # now, so that the next image finds it
                except SaverError as error:
                    self._no_images(error)

        def discard(why: str) -> None:
            if save:
                self.discard(manifest.commit, why)

        break_seal(memory)
        stalls = self._pace.stalls if save else None
        copier.begin(image.copy_to(memory, later=copier.select(owned)), complete, discard, stalls)
        return True

    def _no_images(self, error: SaverError) -> None:
        """Go on without images, or without a saver."""
        if error.fault is Fault.SAVER_LOST:
            self.lose(error)
            return
        self._images_off, self._pace.image_spacing, self._pace.image_step = True, 0, -1
        say(f"{error}; without images, an unannounced loss costs the steps since the last save")

    def _say_limited(self, client: Client) -> None:
        if client.images.limited is not None and not self._limited:
            self._limited = True
            say(f"{client.images.limited}; with memory for two images, none is made while the disk writes a checkpoint")

    def discard(self, commit: Commit, why: str) -> None:
        """Give up a save whose copy may be torn, and make another save due at once."""
        self.fail(commit, why)
        self._pace.since = -math.inf

    def begin(self, commit: Commit) -> bool:
        """Begin a save; return whether this rank has to write this checkpoint and has a saver."""
        if self._folder is None:
            return False
        self._asked, self._began = self._control.request_number, time.monotonic()
        with self._reporting():
            if self._client is None and commit != self.commit:
                self._connect(0.0)  # the last saver was lost: connect to a new one if it answers at once
        if commit == self.commit:  # this checkpoint is already durable
            self._control.answered = max(self._control.answered, self._asked)
            return False
        # An image of this step, left by an earlier connection, may be on its way to the disk.
        return self._client is not None and self._client.pending != commit

    def stage(self, size: int) -> tuple[MemoryHandle, memoryview] | None:
        """Return the staging memory to write to; None if no saver is available."""
        with self._reporting():
            if self._client is not None:
                memory = self._client.stage(size)
                return MemoryHandle(os.getpid(), self._client.fd, len(memory)), memoryview(memory)
        return None

    def request(self, manifest: Manifest, stretches: tuple[Stretch, ...], *, part: bool = False) -> None:
        """Request that the staged bytes become durable."""
        with self._reporting():
            if self._client is not None:
                self._client.save(manifest, stretches, part=part)

    def publish(self, manifest: Manifest) -> None:
        """Request COMMIT. Called once all nodes have written their parts."""
        self.written = None
        with self._reporting():
            if self._client is not None:
                self._client.publish(manifest)

    def fail(self, commit: Commit, why: str) -> None:
        """Report a failed save whose cause lies outside this node's saver, such as a failure on another machine."""
        self.written = None
        self._tell(Fault.WRITE_FAILED, f"checkpoint {commit} was not saved: {why}")

    def copy(self, manifest: Manifest, stretches: tuple[Stretch, ...]) -> None:
        """Make durable the checkpoint that this rank has received from a peer into the staging memory."""
        self._began = time.monotonic()
        self.request(manifest, stretches)

    def poll(self) -> None:
        """Process the result of a save, if there is one. Takes about a microsecond."""
        if self._client is not None and self._client.pending is not None:
            with self._reporting():
                self._receive(self._client.poll())

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait until no save runs, at most ``timeout_s`` seconds."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while self._client is not None and self._client.pending is not None:
            with self._reporting():
                event = self._client.wait(None if end is None else end - time.monotonic())
                if event is None:
                    return
                self._receive(event)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """Report the error of a failed request instead of raising it."""
        try:
            yield
        except SaverError as error:
            self.lose(error)

    def _receive(self, event: Event | None) -> None:
        if isinstance(event, SaveDurable):
            if not event.kept:
                self._pace.saves.append(time.monotonic() - self._began)
            self.commit = max(event.commit, self.commit or event.commit)
            self._control.committed(self.commit)
            self._control.save_s = self._pace.save_s
            self._control.fault, self.failed = Fault.NONE, False
            self._control.answered = max(self._control.answered, self._asked)
        elif isinstance(event, PartWritten):
            self.written = event.manifest
        elif isinstance(event, SaveFailed):
            self._tell(event.fault, f"checkpoint {event.commit} was not saved: {event.why}")

    def lose(self, error: SaverError) -> None:
        """Report a failed request; the next save tries again. If the saver is gone, also close the connection."""
        self._tell(error.fault, str(error))
        self._silent |= isinstance(error, SaverSilentError) and self._silence_s() is not None
        if error.fault is Fault.SAVER_LOST and self._client is not None:
            self._client.close()
            self._client = None

    def _tell(self, fault: Fault, why: str) -> None:
        self._control.fault, self.failed = fault, True
        kept = f"; {self.commit} stays the newest" if self.commit else ""
        ends = self._control.state in (RunPhase.STOPPING, RunPhase.FINISHING)
        if ends and self._none():
            kept = f"; no checkpoint exists in {self._folder}"
        then = "the run ends without this save" if ends else "training goes on"
        say(f"{fault.name.lower().replace('_', ' ')}: {why}{kept}; {then}")

    def _none(self) -> bool:
        """Whether this node's disk has neither a checkpoint nor a part of one."""
        with contextlib.suppress(OSError):
            if self.commit is None and self._folder is not None:
                return not (complete(self._folder) or partial(self._folder))
        return False
