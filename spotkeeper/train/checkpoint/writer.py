"""The trainer's side of a save: when the next save is due, and the requests to the saver. One rank per node writes.

A failed save never stops training: the control file and stderr report the failure, the older checkpoint stays, and the
next save is tried as usual.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from spotkeeper.train.agent_link.control import AgentRequest, Commit, Control, Fault, RunPhase
from spotkeeper.train.checkpoint.client import Client
from spotkeeper.train.checkpoint.durable import MemoryHandle
from spotkeeper.train.checkpoint.image import Image, RunState
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
from spotkeeper.train.checkpoint.store import STATE, Manifest, complete, partial
from spotkeeper.train.core.errors import say
from spotkeeper.train.core.settings import RunSettings

IMAGE_S = 0.2  # shortest time between two images
_SAMPLES = 8  # images after which their cost is known: a few of the first are checked, and one may meet a hiccup
_SAMPLES_S = 5.0  # longest time between images before that
_RECONNECT_S = 5.0  # pause between two tries to reach a new saver for images
SHORTEST_S = 1.0
LONGEST_S = 3600.0
_IDLE = 4.0  # the saver may write a quarter of the time: while it writes, steps are slower
_START_S = 5.0  # time for the agent to start the saver
# Whoever requests a stop waits 10 s. So a silent saver gets _STOP_S seconds. The next try, with a new saver or the same
# one, gets _STOP_AGAIN_S.
_STOP_S = 6.0
_STOP_AGAIN_S = 1.0


def young(stall_s: float, mean_life_s: float, save_s: float = 0.0) -> float:
    """Return the cheapest interval between saves, seconds: sqrt(2 x cost of a save x mean time between losses).

    J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974. The interval is
    never so short that the saver writes more than a quarter of the time.
    """
    best = math.sqrt(2.0 * stall_s * mean_life_s)
    return min(max(best, _IDLE * save_s, SHORTEST_S), LONGEST_S)


class RecentTimes(deque[float]):
    """The newest ``size`` values, also kept in order, so that their median costs nothing. Values are only appended."""

    def __init__(self, size: int) -> None:
        super().__init__(maxlen=size)
        self._ordered: list[float] = []

    def append(self, value: float) -> None:
        if len(self) == self.maxlen:
            del self._ordered[bisect_left(self._ordered, self[0])]
        insort(self._ordered, value)
        super().append(value)

    @property
    def median(self) -> float:
        """The median, 0.0 without values."""
        ordered, middle = self._ordered, len(self) // 2
        if not ordered:
            return 0.0
        return ordered[middle] if len(self) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


@dataclass
class SavePace:
    """Measured times of one rank's steps and saves, and the interval between saves that follows from them, in seconds.

    A *stall* is the time that a save stops the loop. ``stalls`` can come from an older generation. If it is
    empty and the job file sets no interval, a save is due at once: this save tests the disk and measures a stall.
    """

    mean_life_s: float
    fixed_s: float | None = None  # interval set by the job file
    overhead: float = 0.01  # largest share of the training time that images may cost
    steps: RecentTimes = field(default_factory=lambda: RecentTimes(64))
    stalls: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    saves: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    since: float = 0.0  # start of the last save, or of the loop before any save; -inf: a save is due at once
    image_stalls: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    image_steps: RecentTimes = field(default_factory=lambda: RecentTimes(16))  # times of steps that follow an image
    image_since: float = 0.0  # end of the last image's stall
    image_spacing: int = 0  # steps between the two newest images; 0: fewer than two
    image_step: int = -1  # step of the newest image; -1: none
    imaged: bool = False  # an image was begun at the last boundary, or is still being copied to another machine
    image_steps_each: int = 1  # steps that the newest image has slowed down
    plain: bool = False  # the last step followed no image

    @property
    def step_s(self) -> float:
        return self.steps.median

    @property
    def stall_s(self) -> float:
        return median(self.stalls or [0.0])

    @property
    def save_s(self) -> float:
        return median(self.saves or [0.0])

    @property
    def interval_s(self) -> float:
        if self.fixed_s is not None:
            return self.fixed_s
        return young(self.stall_s, self.mean_life_s, self.save_s) if self.stalls else 0.0

    def due(self, now: float, *, images: bool = False) -> bool:
        """Whether a save is due. With ``images``, a save is the next image, unless images are rarer than saves."""
        if now - self.since < self.interval_s:
            return False
        return not images or self.image_due(now) or max(self.image_interval_s, -self.since) > self.interval_s

    def add_step(self, seconds: float) -> None:
        """Add the time of a step, without the stall before it."""
        self.plain = not (self.imaged and self.steps)
        (self.steps if self.plain else self.image_steps).append(seconds)
        self.imaged = False

    @property
    def image_cost_s(self) -> float:
        """Seconds that keeping one image costs: its stall, and how much longer steps take until it is copied."""
        slower = self.image_steps.median - self.step_s if self.image_steps else 0.0
        return median(self.image_stalls or [0.0]) + max(0.0, slower) * self.image_steps_each

    @property
    def image_interval_s(self) -> float:
        """Shortest time between two images, so that they cost at most the share ``overhead`` of the training time.

        The first images may cost more, because it takes some to measure what one costs.
        """
        wanted_s = max(IMAGE_S, self.image_cost_s / self.overhead)
        return wanted_s if len(self.image_steps) >= _SAMPLES else min(wanted_s, _SAMPLES_S)

    @property
    def image_share(self) -> float:
        """Share of the training time that images cost at their present spacing; 0.0 before the second image."""
        between_s = self.image_spacing * self.step_s
        return self.image_cost_s / (between_s + self.image_cost_s) if between_s else 0.0

    def add_image(self, began: float, ended: float, step: int) -> None:
        """Note that an image of ``step`` was begun at a boundary, which it stopped from ``began`` to ``ended``."""
        self.image_stalls.append(ended - began)
        self.image_since = ended
        if self.image_step >= 0:
            self.image_spacing = step - self.image_step
        self.image_step, self.imaged, self.image_steps_each = step, True, 1

    def add_copying(self) -> None:
        """Note that the newest image is still being copied, so it slows down another step."""
        if not self.imaged:
            self.imaged, self.image_steps_each = True, self.image_steps_each + 1

    def hurry(self) -> None:
        """Make an image due at once."""
        self.plain, self.image_since = True, -math.inf

    def image_due(self, now: float) -> bool:
        """Whether an image is due. Never after both of two steps: the steps between show what an image costs."""
        return self.plain and now - self.image_since >= self.image_interval_s


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
        image = Image(state)
        if (staged := self.stage(image.size)) is None:
            return
        if copier is None or not (later := copier.select(owned)):
            image.copy_to(staged[1])
            self.request(manifest, image.stretches)
        else:
            copier.begin(
                image.copy_to(staged[1], later=later),
                lambda: self.request(manifest, image.stretches),
                lambda why: self._discard(manifest.commit, why),
                self._pace.stalls,
            )

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
        image = Image(state)
        try:
            memory = client.image(number, image.size, wait=save)
        except SaverError as error:
            self._no_images(error)
            return False
        self._say_limited(client)
        if memory is None:
            return False

        def complete() -> None:
            if self._client is not client:  # the saver was lost; another one may have given the memory to another image
                return
            if not seal(memory, manifest, image.stretches):
                self._no_images(SaverError(Fault.WRITE_FAILED, "the gang is too large for an image's seal"))
                discard("an image's seal has no room for so many ranks")
                return
            client.images.newest = number
            if save:
                with self._reporting():
                    for each in range(IMAGES):  # now, since the saver answers no request while it writes
                        client.images.open(each, image.size)
                    client.save(manifest, image.stretches, image=number)

        def discard(why: str) -> None:
            if save:
                self._discard(manifest.commit, why)

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

    def _discard(self, commit: Commit, why: str) -> None:
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
