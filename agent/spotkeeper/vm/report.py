"""What a running job's control file says to the outside: progress, a stall, a save that failed.

Quiet when all is well: only the lowest member reports, once a minute and at commits.
Reads the control file; decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from spotkeeper.spec.facts import Kind
from spotkeeper.spec.generation import FactIn, Generation, Progress
from spotkeeper.train.control import Commit, Control, Fault, State

EVERY_S = 60.0  # virtual
STALL_FACTOR = 10.0
STALL_MIN_S = 30.0  # real; a first step compiles, a loader starts its workers
UNSAVED = {Fault.WRITE_FAILED: "write-failed", Fault.SAVER_LOST: "saver-lost"}
TIMES = 4  # that a generation's trouble with saving is told as over; trouble that keeps coming back stays told
MOST = 1 << 40  # steps; the function takes no number that it cannot believe, nor what is said beside it
LATE_FACTOR = 3.0
LATE_MIN_S = 1.0  # real


@dataclass
class Reporter:
    """Of one generation. ``lowest``: whether this node reports for the job."""

    gen: int
    lowest: bool
    told_at: float = float("-inf")  # virtual
    told_commit: Commit | None = None
    told_first: bool = False
    troubled: bool = False  # a save failed, and none has succeeded since
    times: int = 0  # that saving was in trouble, and is no more
    lagging: bool = False  # this machine holds the others up, and was said to
    lags: int = 0  # how often it did no more
    step_at: float = 0.0  # the job's word for when a step ended: only whether it changes counts
    step_seen: float = 0.0  # monotonic, when it was first read here: nobody sets that clock

    @classmethod
    def of(cls, doc: Generation, rank: int) -> Reporter:
        return cls(doc.gen, rank == min(member.rank for member in doc.members))

    def progress(self, control: Control, now: float, *, last: bool = False) -> Progress | None:
        """Something to tell, if it is time: a minute has passed, a commit or the first step has come, or ``last``."""
        if not self.lowest or control.state in (State.STARTING, State.RESTORING):
            return None
        commit, first = control.commit, control.first_step_at > 0
        news = commit != self.told_commit or first != self.told_first
        if not (news or last or not 0 <= now - self.told_at < EVERY_S):  # below 0: the clock was set
            return None
        self.told_at, self.told_commit, self.told_first = now, commit, first
        return Progress(
            gen=self.gen,
            step=min(control.step, MOST),
            at=now,
            samples_per_s=_amount(control.samples_per_s),
            step_s=_amount(control.step_s),
            loss=control.loss,
            commit_gen=None if commit is None else commit.gen,
            commit_step=None if commit is None else commit.step,
            save_s=_amount(control.save_s),
            total_steps=min(control.total_steps, MOST) or None,
        )

    def facts(self, control: Control, now: float) -> list[FactIn]:
        """A full disk, another trouble with saving, the end of such trouble, or a step that does not end.

        ``now``: monotonic seconds, here and below.
        """
        found = [*self._saving(control.fault), *self._lagging(control.lag)]
        if self._age(control, now) > max(STALL_MIN_S, STALL_FACTOR * control.step_s):
            found.append(FactIn(Kind.SLOW, self.gen, str(control.step)))
        return found

    def late(self, control: Control, now: float) -> bool:
        """Whether the step under way takes three times the median: something may be about to be said."""
        return control.step_s > 0 and self._age(control, now) > max(LATE_MIN_S, LATE_FACTOR * control.step_s)

    def _age(self, control: Control, now: float) -> float:
        """Real seconds since the last step was seen to have ended, 0 where none is under way."""
        if control.step_at != self.step_at:
            self.step_at, self.step_seen = control.step_at, now
        if control.state is not State.TRAINING or control.step_at <= 0:
            return 0.0
        return now - self.step_seen

    def _lagging(self, lag: float) -> list[FactIn]:
        """The library judges; here it is said once when it begins, and once when it is over."""
        if lag > 1.0 and not self.lagging and self.lags < TIMES:
            self.lagging = True
            return [FactIn(Kind.LAGS, self.gen, f"{self.lags}-{int(min(lag, 999.0) * 100 + 0.5)}")]
        if lag == 0.0 and self.lagging:
            self.lagging, self.lags = False, self.lags + 1
            return [FactIn(Kind.KEEPS_UP, self.gen, str(self.lags - 1))]
        return []

    def _saving(self, fault: Fault) -> list[FactIn]:
        which = f"-{self.times}" if self.times else ""
        if fault is Fault.DISK_FULL:
            self.troubled = True
            return [FactIn(Kind.FULL, self.gen, str(self.times))]
        if fault in UNSAVED:
            self.troubled = True
            return [FactIn(Kind.UNSAVED, self.gen, UNSAVED[fault] + which)]
        if fault is not Fault.NONE or not self.troubled or self.times >= TIMES:
            return []
        self.troubled, self.times = False, self.times + 1
        return [FactIn(Kind.SAVED, self.gen, str(self.times - 1))]


def _amount(value: float) -> float | None:
    """A measure that means something: the job writes them, and may write anything."""
    return value if 0.0 < value < MOST else None
