"""The boundary between two batches, after an optimizer step: the only place where a run saves, publishes or stops.

The run's state is complete there. No boundary follows a batch that only accumulates gradients.

**Agreement.** Every rank has its own view: its agent's request, its clock, whether its saver is busy. A rank that acted
on its view alone would wait in the gather of a save while the others wait in their next all-reduce. So every k steps
each rank encodes its view as one integer, the highest of all ranks wins, and all ranks act on it after the next step.
The exchange overlaps with that step, so no rank waits for the exchange. The ranks agree on k too: as many steps as the
slowest rank does in ``EVERY_S`` seconds.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from enum import IntEnum

from spotkeeper.train.agent_link.control import AgentRequest, Commit, Control, Outcome, RunPhase
from spotkeeper.train.checkpoint.restore import EarlyRead
from spotkeeper.train.checkpoint.sharded import find_strategy
from spotkeeper.train.checkpoint.strategy import ResumePoint
from spotkeeper.train.checkpoint.writer import CheckpointWriter
from spotkeeper.train.core import signals
from spotkeeper.train.core.division import Speeds
from spotkeeper.train.core.errors import say
from spotkeeper.train.core.gang import Gang
from spotkeeper.train.core.microbatch import shares
from spotkeeper.train.core.pace import SavePace
from spotkeeper.train.core.parts import Attached
from spotkeeper.train.core.settings import RunSettings
from spotkeeper.train.data.feed import Feed
from spotkeeper.train.loop import diagnostics
from spotkeeper.train.loop.lag import LagMonitor, Stopwatch, WindowTimes
from spotkeeper.train.loop.position import RunPosition
from spotkeeper.train.loop.rendezvous import GangInfo
from spotkeeper.train.loop.reporter import BatchesLeft, RunReporter

EVERY_S = 0.2  # time between exchanges; a request takes effect within twice this time plus one step
_MOST = 1000
_SHIFT = 40


class StepAction(IntEnum):
    """A rank's view, and the action that all ranks then take: the highest view.

    BUSY is above SAVE, so that no second save starts while any saver is writing. PUBLISH is between SAVE and BUSY: once
    no rank is BUSY, all nodes have written their parts of sharded state, and publishing comes before another save. STOP
    is above BUSY: a stop waits for the running save, then saves. BUSY_IMAGE: an image can be kept while a saver writes.
    FULL is above it: a saver writes one image, another one is the newest, and the rank has no memory for a third one.
    """

    NOTHING = 0
    IMAGE = 1
    SAVE = 2
    PUBLISH = 3
    BUSY = 4
    BUSY_IMAGE = 5
    FULL = 6
    STOP = 7


class Agreement:
    """The exchange by which all ranks of a run agree on an action."""

    def __init__(self, gang: Gang) -> None:
        self._gang = gang
        self._pending: Callable[[], int] | None = None
        self._every = 1
        self._steps = 0

    def after_step(self, view: Callable[[], StepAction], step_s: float) -> StepAction:
        """Return the action that all ranks take now. Collective: all ranks call it after the same steps.

        Args:
            view: returns this rank's view; called only if the view is sent.
            step_s: this rank's usual step time, seconds.
        """
        if self._gang.world == 1:
            return view()
        self._steps += 1
        answer = StepAction.NOTHING
        if self._pending is not None:
            answer, slowest_s = _decode(self._pending())
            self._pending = None
            self._every = max(1, min(_MOST, int(EVERY_S / slowest_s))) if slowest_s else 1
        # After an agreed save the view is not sent: it would still request that save, and so cause a second save.
        if answer in (StepAction.NOTHING, StepAction.BUSY, StepAction.FULL) and self._steps % self._every == 0:
            self._pending = self._gang.highest(_encode(view(), step_s))
        return answer

    def drain(self) -> None:
        """Finish the pending exchange at the loop's end. Collective."""
        if self._pending is not None:
            self._pending()
            self._pending = None


def _encode(call: StepAction, step_s: float) -> int:
    """Pack the action (high bits) and the step time in microseconds into one integer."""
    return call << _SHIFT | min(int(step_s * 1e6), (1 << _SHIFT) - 1)


def _decode(word: int) -> tuple[StepAction, float]:
    return StepAction(word >> _SHIFT), (word & ((1 << _SHIFT) - 1)) / 1e6


class Boundary:
    """Saves, restores and stops one run."""

    def __init__(
        self,
        parts: Attached,
        gang: Gang,
        settings: RunSettings,
        info: GangInfo,
        control: Control,
        pace: SavePace,
        position: RunPosition,
        reporter: RunReporter,
        speeds: Speeds | None = None,
    ) -> None:
        self._parts, self._gang, self._settings, self._info = parts, gang, settings, info
        self._control, self._pace, self._position, self._reporter = control, pace, position, reporter
        self._speeds = speeds  # None: the division of work never changes
        self._agreement = Agreement(gang)
        here = tuple(place.rank for place in info.places if place.node == gang.node)
        self._lag = LagMonitor(gang, here, control)
        self.watch = Stopwatch(parts.ddp)
        self.writer = CheckpointWriter(settings, None if gang.local_rank else info.folder, control, pace)
        self._strategy = find_strategy(gang, self.writer, control, info.places, parts, settings, pace)
        self._samples = 0  # samples of this rank in the current step
        self._saved: int | None = None  # step of the last staged save
        self._durable = True  # whether a disk has the state from which the run started
        self._answered = 0  # number of the agent's last save request that was answered
        self.last_end = 0.0  # end of the last step, monotonic seconds; moved forward by time that belongs to no step

    # ------------------------------------------------------------ beginning

    def restore(self, early: EarlyRead | None = None) -> ResumePoint | None:
        """Load the newest checkpoint or image that any rank has, and return it; None in a new run. Collective."""
        known = self.writer.greet(self._info.gen)
        self._gang.gather(b"")  # a barrier: savers have finished the saves of older generations
        found, skipped = self._strategy.begin(self._info.folder, known, early)
        for each in skipped:
            say(f"skipped checkpoint {each}")
        if found is not None:
            self._load(found)
        else:
            self._position.begin()
        for optimizer in self._parts.optimizers[:1]:
            optimizer.register_step_post_hook(self._position.count_step)
        if self._gang.local_rank == 0:
            self._control.pid = os.getpid()
            self._control.restored_at = time.time()
            self._control.state = RunPhase.TRAINING
        return found

    def _load(self, found: ResumePoint) -> None:
        try:
            self._position.load(found)
        except (RuntimeError, ValueError, KeyError) as error:
            where = str(self._info.folder or found.source)
            if (why := diagnostics.misfit(self._parts, found, where, self._settings.managed, error)) is None:
                raise
            raise why from error
        self._saved, self._durable = self._position.step if found.durable else None, found.durable
        if self._gang.local_rank == 0:
            then = found.manifest
            self._control.resumed(then.commit, sum(file.bytes for file in (*then.files, *then.others)))
            change = f"saved by {_ranks(then.world)}, now {self._gang.world}: random generators are reseeded"
            resized = "" if found.same_world else f"; {change}"
            say(f"generation {self._info.gen}: resumed from {then.commit} ({found.source}{resized})")

    def start_loop(self) -> None:
        self._pace.since = self.last_end = time.monotonic()
        if not self._durable:  # a second loss must not find it gone
            self._pace.since = -math.inf
        self._position.stepped = False
        self._samples = 0
        self.writer.own_offer()
        self.watch.begin()

    def add_samples(self, count: int) -> None:
        """Count samples of the current step."""
        self._samples += count

    # ------------------------------------------------------------ between two batches

    def after_batch(self, feed: Feed, left: BatchesLeft | None) -> None:
        """Count a batch. If it ended with an optimizer step, save, publish or stop as all ranks agreed. Collective.

        Raises:
            SystemExit: 0, after a stop.
        """
        self._reporter.batch()
        if not self._parts.optimizers:
            self._position.count_step()
        if not self._position.stepped:
            return
        now = time.monotonic()
        first = not self._pace.steps
        self._pace.add_step(now - self.last_end)
        self.last_end = now
        self._position.end_step()
        self.writer.poll()
        self._reporter.stepped(self._position.step, feed.position.batch, left)
        if first:
            self._strategy.warm(self._position)
        ahead = feed.division.ahead if feed.division else 0
        told = self._lag.after_step(self.watch.end(), self._samples, self._pace.step_s, ahead)
        if told is not None:
            self._divide(told, feed)
        self._samples = 0
        if self._strategy.advance():
            self._pace.add_copying()
        action = self._agreement.after_step(self._view, self._pace.step_s)
        if action is StepAction.STOP:
            self._stop()
        elif self.reached and (left is None or left.batches):  # else the code after the loop comes first
            self.reach()
        elif action is StepAction.SAVE:
            self.save(overlap=True)
            self.last_end = time.monotonic()  # the time of a save belongs to no step
        elif action is StepAction.PUBLISH:
            self._strategy.publish()
        elif action in (StepAction.IMAGE, StepAction.BUSY_IMAGE):
            self._keep_image()
            self.last_end = time.monotonic()
        self.watch.begin()

    def _divide(self, told: list[WindowTimes], feed: Feed) -> None:
        """Divide the work of the coming global batches anew if speeds have changed. All ranks do so or none does."""
        if self._speeds is None or feed.division is None:
            return
        costs, count = [each.sample_s for each in told], feed.division.count
        if not self._speeds.window(costs, count):
            return
        now = feed.position.consumed // feed.position.batch
        wait = feed.division.change(now, int(max(each.ahead for each in told)), costs) - now
        if not self._gang.rank:
            parts = ", ".join(map(str, shares(count, costs)))
            say(f"speeds have changed: from step {self._position.step + wait + 1} on ranks do {parts} micro-batches")

    def _view(self) -> StepAction:
        control = self._control
        requested = control.requested
        if requested is AgentRequest.SAVE_STOP:
            return StepAction.STOP
        now = time.monotonic()
        free = self._strategy.next_image() is not None
        image = free and self._pace.image_due(now)
        if self.writer.busy or self._strategy.copying:
            full = self._strategy.images and not free
            return StepAction.FULL if full else StepAction.BUSY_IMAGE if image else StepAction.BUSY
        if self._strategy.ready():
            return StepAction.PUBLISH
        if requested is AgentRequest.SAVE and control.request_number > self._answered:
            return StepAction.SAVE
        if self.writer.writes and self._pace.due(now, images=free and self._strategy.images):
            return StepAction.SAVE
        return StepAction.IMAGE if image else StepAction.NOTHING

    def _keep_image(self) -> None:
        """Keep an image of the state in the saver's memory. Collective."""
        began = time.monotonic()
        if self._strategy.image(self._position, Commit(self._info.gen, self._position.step)):
            self._pace.add_image(began, time.monotonic(), self._position.step)
        elif self._strategy.next_image() is not None:
            self._pace.image_since = time.monotonic()  # the next try; without memory: once there is some

    def save(self, *, overlap: bool = False) -> None:
        """Stage a save; the checkpoint becomes durable later. Collective.

        On return the state may change again. With ``overlap``, optimizers' tensors may change only in a step of these
        optimizers, or after ``copied``.
        """
        began = time.monotonic()
        self._answered = self._control.request_number
        self._saved, self._durable = self._position.step, True
        self._strategy.save(self._position, Commit(self._info.gen, self._position.step), overlap=overlap)
        if not overlap:
            self.copied()
        self._pace.since = time.monotonic()
        self._pace.stalls.append(self._pace.since - began)
        if overlap and self._strategy.images:  # the save is an image
            self._pace.add_image(began, self._pace.since, self._position.step)
        self._reporter.stalled()

    def copied(self) -> None:
        """Wait until the last save no longer needs the state."""
        self._strategy.copied()

    def settle(self, timeout_s: float | None = None) -> Commit | None:
        """Wait until no save runs; return this node's newest durable checkpoint. Collective with sharded state."""
        self._strategy.settle(timeout_s)
        return self.writer.commit

    # ------------------------------------------------------------ ending

    def _stop(self) -> None:
        """Save, wait until the checkpoint is durable, and end the process, so the code after the loop does not run."""
        self._lag.drain()
        self._reporter.phase(RunPhase.STOPPING)
        self.settle(self._reporter.time_left_s())
        self.save()
        self.leave()

    @property
    def reached(self) -> bool:
        """Whether the run is a trial of a search that has done the steps up to its rung."""
        return self._settings.until is not None and self._position.step >= self._settings.until

    def reach(self) -> None:
        """Save, unless the state is saved already, and end the process: the search compares its trials. Collective."""
        self._lag.drain()
        self._agreement.drain()
        self._reporter.phase(RunPhase.STOPPING)
        self.settle(self._reporter.time_left_s())
        if self._saved != self._position.step or self._gang.highest(int(self.writer.failed))():
            self.save()
        self.leave("reached")

    def leave(self, outcome: Outcome = "stopped") -> None:
        """End the process after a stop, by ``SystemExit(0)``."""
        self.end(outcome)
        self.writer.close()
        signals.end_workers()
        raise SystemExit(0)

    def end_loop(self, *, more: bool) -> None:
        """Save at a loop's end, unless the state is saved already. Collective. ``more``: whether an epoch follows."""
        self._lag.drain()
        self._agreement.drain()
        if not more:
            self._reporter.phase(RunPhase.FINISHING)
        self.settle()
        if self._saved != self._position.step or self._gang.highest(int(self.writer.failed))():
            self.save()
        if self._parts.sharded:
            self.settle()

    def end(self, outcome: Outcome) -> None:
        """Wait for the last save and write this generation's ``result.json``."""
        self.settle(self._reporter.time_left_s())
        self._reporter.end(outcome, self._info.gen, self._position.step, self.writer.commit)


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
