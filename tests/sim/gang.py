"""Training of one generation: all of its machines move together, and only together.

Steps and saves are computed when somebody asks, not one by one. A gang stops in one of three ways: it was asked
to save and stop (all agree on a step), a machine of it went (the others' processes die of it, or hang), or the
job's own end. What each generation starts from must be the newest commit there is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotkeeper.contract.facts import Kind
from spotkeeper.contract.generation import Generation, Progress
from spotkeeper_agent.job.progress import EVERY_S, LONE_EVERY_S

if TYPE_CHECKING:
    from tests.sim.agent import Agent
    from tests.sim.cloud import Commit
    from tests.sim.engine import Timer
    from tests.sim.world import Job, World

RESTORE_S = 1.5
SAVE_S = 2.0
RENDEZVOUS_S = 60.0
PEER_S = (0.5, 3.0)  # until a survivor's process dies of its peer's end
STALL_S = 30.0  # until a hanging step is told


class Gang:
    """The machines of one generation of one job."""

    def __init__(self, world: World, job: Job, doc: Generation) -> None:
        self.world, self.job, self.gen = world, job, doc.gen
        self.size = len(doc.members)
        self.lowest = min(member.node for member in doc.members)
        self.disks = {member.uid for member in doc.members if member.disk}
        self.agents: list[Agent] = []
        self.began: float | None = None  # training since, virtual seconds
        self.first = 0  # the step it started from
        self.saved = 0  # saves of the interval that were applied to the disks
        self.commit: Commit | None = None  # of this generation
        self.stopping = False
        self.over = False
        self._end: Timer | None = None
        self._crash: Timer | None = None

    # -- coming together

    def join(self, agent: Agent) -> None:
        self.agents.append(agent)
        if len(self.agents) == 1:
            self.world.engine.after(RENDEZVOUS_S, self._nobody_came)
        if len(self.agents) == self.size and not self.over:
            self.world.engine.after(RESTORE_S, self._start)

    def _nobody_came(self) -> None:
        if self.began is None and not self.over and not self.stopping:
            self._close(0, "rendezvous")
            for agent in list(self.agents):
                agent.ended(Kind.EXIT, 1)

    def _start(self) -> None:
        """All are there: restored from the newest commit that a writing member holds."""
        if self.over or self.stopping or len(self.agents) < self.size:
            return
        drives = [a.mounted for a in self.agents if a.mounted is not None and a.uid in self.disks]
        found = max((d.newest for d in drives if d.newest is not None), default=None)
        job, world = self.job, self.world
        newest = max((d.newest for d in world.cloud.drives.values() if d.disk.job == job.id and d.newest), default=None)
        if found != newest and not job.may_forget:
            world.violate("stale", f"generation {self.gen} starts from {found}, the newest commit is {newest}")
        self.began, self.first = world.engine.t, found[1] if found else 0
        job.training_again(self)
        self._end = world.engine.after((job.steps - self.first) * job.step_s, self.finish)
        if job.crashes_left > 0:
            job.crashes_left -= 1
            self._crash = world.engine.after(job.crash_after_s, self.user_crash)

    # -- how far it is

    def step(self) -> int:
        if self.began is None:
            return self.first
        return min(self.job.steps, self.first + int((self.world.engine.t - self.began) / self.job.step_s))

    def settle(self) -> None:
        """Bring the disks up to date: saves begin every interval and are durable ``SAVE_S`` later."""
        if self.began is None or self.over:
            return
        job = self.job
        done = int((self.world.engine.t - self.began - SAVE_S) / job.interval_s)
        if done > self.saved:
            self.saved = done
            self._write(self.first + int(done * job.interval_s / job.step_s))

    def _write(self, step: int) -> None:
        """Every member with its disk mounted writes a full copy."""
        commit = (self.gen, step)
        if self.commit is not None and commit <= self.commit:
            return
        writers = [agent for agent in self.agents if agent.mounted is not None]
        if not writers:
            self.world.violate("commit", f"generation {self.gen} of {self.job.id} has nowhere to save")
            return
        for agent in writers:
            drive = agent.mounted
            assert drive is not None
            if drive.user != agent.uid:
                self.world.violate("S2", f"{agent.name} writes to {drive.disk.name}, which {drive.user} holds")
            drive.newest = commit
        self.commit = commit
        self.job.committed = commit

    def progress(self) -> Progress | None:
        """As the lowest member last told it: at its interval, and at a commit."""
        if self.began is None:
            return None
        self.settle()
        every_s = EVERY_S if self.size > 1 else LONE_EVERY_S
        told = self.began + int((self.world.engine.t - self.began) / every_s) * every_s
        step = self.first + int((told - self.began) / self.job.step_s)
        commit = self.commit
        return Progress(
            gen=self.gen,
            step=max(step, commit[1] if commit else 0),
            at=told,
            commit_gen=commit[0] if commit else None,
            commit_step=commit[1] if commit else None,
            save_s=SAVE_S,
        )

    # -- how it ends

    def save(self) -> None:
        """At a notice: asynchronously, and training goes on."""
        if self.began is None or self.over:
            return
        step = self.step()

        def durable() -> None:
            if not self.over and not self.stopping:
                self._write(step)

        self.world.engine.after(SAVE_S, durable)

    def save_and_stop(self, deadline: float | None) -> None:
        """One node was told, so all agree on the next step."""
        if self.over or self.stopping or self.began is None:
            return
        self.settle()
        self.stopping = True
        step, now = self.step() + 1, self.world.engine.t
        at = now + self.job.step_s + SAVE_S
        if deadline is not None and at > deadline + 0.5:
            self.world.engine.at(max(now, deadline), lambda: self._stopped(None))
        else:
            self.world.engine.at(at, lambda: self._stopped(min(step, self.job.steps)))

    def _stopped(self, step: int | None) -> None:
        if self.over:
            return
        if step is not None:
            self._write(step)
        reached = self.step() if step is None else step
        self._close(reached, "stopped")
        for agent in self.agents:
            agent.ended(Kind.RELEASED)

    def lost(self, agent: Agent, *, hangs: bool) -> None:
        """A machine of it went. The others' processes die of it within seconds, or hang until somebody says so."""
        if self.over:
            if agent in self.agents:
                self.agents.remove(agent)
            return
        self.settle()
        reached = self.step()
        self.agents.remove(agent)
        self._close(reached, "lost")
        for other in list(self.agents):
            after_s = STALL_S if hangs else self.world.random.uniform(*PEER_S)
            self.world.engine.after(after_s, lambda a=other: self._feels(a, hangs))

    def _feels(self, agent: Agent, hangs: bool) -> None:
        """A survivor's processes, unless it has moved on."""
        if agent.gang is self and hangs:
            agent.stalls()
        elif agent.gang is self:
            agent.ended(Kind.EXIT, 1)

    def leave(self, agent: Agent) -> None:
        """It was told to end what it runs: a newer generation, or it is superseded."""
        self.lost(agent, hangs=False)

    def user_crash(self) -> None:
        """A process of the job ends with 1, and takes its peers along."""
        if self.over or self.stopping or self.began is None:
            return
        self.settle()
        self._close(self.step(), "crash")
        for agent in self.agents:
            agent.ended(Kind.EXIT, 1)

    def finish(self) -> None:
        """The last step is done: a last save, and every process ends with 0."""
        if self.over or self.stopping or self.began is None:
            return
        self.settle()
        self._write(self.step())
        self._close(self.step(), "done")
        for agent in self.agents:
            agent.ended(Kind.EXIT, 0)

    def _close(self, reached: int, how: str) -> None:
        trained = self.began is not None
        report = self.progress()
        self.over = True
        for timer in (self._end, self._crash):
            if timer is not None:
                timer.off()
        if report is not None:
            self.world.store.put_progress(self.job.id, report)
        if trained:
            self.job.stopped(reached, how)
        self.world.version += 1
