"""Derives reports from a running job's control file: progress, stalls, failed saves.

Only the member with the lowest node reports progress: at each commit, and once a minute; a lone member twice a minute.
"""

from __future__ import annotations

from dataclasses import dataclass

from spotkeeper.contract.facts import Kind
from spotkeeper.contract.generation import FactIn, Generation, Progress
from spotkeeper.train.agent_link.control import Commit, Control, Fault, RunPhase

EVERY_S = 60.0  # virtual
LONE_EVERY_S = 30.0  # virtual; in a one-machine job, where these reports alone tell the function that it is alive
STALL_FACTOR = 10.0
STALL_MIN_S = 30.0  # real; a first step compiles, and a loader starts its workers
UNSAVED = {Fault.WRITE_FAILED: "write-failed", Fault.SAVER_LOST: "saver-lost", Fault.NO_MEMORY: "no-memory"}
TIMES = 4  # reports per generation that saving works again; a later failure stays reported
MOST = 1 << 40  # steps, bytes; the function refuses requests with larger numbers
MOST_GBIT_S = 1e5
LATE_FACTOR = 3.0
LATE_MIN_S = 1.0  # real


@dataclass
class Reporter:
    """Reports of one generation. ``lowest``: whether this node is the lowest of the members and reports progress."""

    gen: int
    lowest: bool
    every_s: float = EVERY_S
    told_at: float = float("-inf")  # virtual
    told_commit: Commit | None = None
    told_first: bool = False
    troubled: bool = False  # the last save failed
    times: int = 0  # how often saving worked again after a failure
    lagging: bool = False  # whether this machine was reported to slow the others down
    lags: int = 0  # how often that state ended
    step_at: float = 0.0  # a step's end by the job's clock; only changes of it count
    step_seen: float = 0.0  # monotonic; when that value was first read here

    @classmethod
    def of(cls, doc: Generation, node: int) -> Reporter:
        every_s = EVERY_S if len(doc.members) > 1 else LONE_EVERY_S
        return cls(doc.gen, node == min(member.node for member in doc.members), every_s)

    def progress(self, control: Control, now: float, *, last: bool = False) -> Progress | None:
        """Return a report, if one is due: after ``every_s``, after a commit or the first step, or if ``last``."""
        if not self.lowest or control.state in (RunPhase.STARTING, RunPhase.RESTORING):
            return None
        commit, first = control.commit, control.first_step_at > 0
        news = commit != self.told_commit or first != self.told_first
        if not (news or last or not 0 <= now - self.told_at < self.every_s):  # below 0: the clock was set
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
            gbit_s=control.gbit_s if 0.0 < control.gbit_s < MOST_GBIT_S else None,
            restore_s=_between(control.met_at, control.restored_at),
            restored_bytes=min(control.restored_bytes, MOST) or None,
            first_s=_between(control.restored_at, control.first_step_at),
            image_steps=min(control.image_steps, MOST) or None,
            image_share=_amount(control.image_share),
        )

    def facts(self, control: Control, now: float) -> list[FactIn]:
        """Return the facts to report: a full disk, other failed saves, saves that work again, a straggler, a stall.

        ``now`` is in monotonic seconds, here and in the methods below.
        """
        found = [*self._saving(control.fault), *self._lagging(control.lag)]
        if self._age(control, now) > max(STALL_MIN_S, STALL_FACTOR * control.step_s):
            found.append(FactIn(Kind.STALL, self.gen, str(control.step)))
        return found

    def late(self, control: Control, now: float) -> bool:
        """Whether a step takes over three times the median; the agent then polls faster, to report a stall soon."""
        return control.step_s > 0 and self._age(control, now) > max(LATE_MIN_S, LATE_FACTOR * control.step_s)

    def _age(self, control: Control, now: float) -> float:
        """Return the real seconds since this agent saw the last step end; 0 if no step is running."""
        if control.step_at != self.step_at:
            self.step_at, self.step_seen = control.step_at, now
        if control.state is not RunPhase.TRAINING or control.step_at <= 0:
            return 0.0
        return now - self.step_seen

    def _lagging(self, lag: float) -> list[FactIn]:
        """Report when this machine becomes a straggler, as the library measures it, and when it no longer is one."""
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


def _between(start: float, end: float) -> float | None:
    """Return the seconds between two moments that the job has noted; None if one is missing."""
    return _amount(end - start) if start > 0.0 and end > 0.0 else None


def _amount(value: float) -> float | None:
    """Return a measured value if it is plausible, otherwise None: the job can write anything."""
    return value if 0.0 < value < MOST else None
