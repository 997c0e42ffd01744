"""The machine's state, shared by the parts of the agent's loop: assignment, newest document, activity.

:class:`Saved`, in ``run/spotkeeper/agent.json``, survives a killed agent but not a reboot. The document is not stored:
a restarted agent fetches it again.
"""

from __future__ import annotations

import contextlib
import os
import time
from enum import Enum
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from spotkeeper.clock import Clock
from spotkeeper.contract import codec
from spotkeeper.contract.facts import Kind
from spotkeeper.contract.generation import FactIn, Generation, JobRun, Member
from spotkeeper.train.core import beneath
from spotkeeper_agent.cloud.notice import Notice
from spotkeeper_agent.core.log import Log
from spotkeeper_agent.core.settings import Settings
from spotkeeper_agent.core.sync import Syncer
from spotkeeper_agent.host.systemd import notify


class Assignment(Struct, frozen=True):
    """The job, node and attempt that the function assigned to this machine."""

    job: str
    node: int
    attempt: int
    disk: int | None = None

    def same_life(self, other: Assignment | None) -> bool:
        """Whether both are the same attempt. Their disks can differ, because a disk can be attached later."""
        return other is not None and (self.job, self.node, self.attempt) == (other.job, other.node, other.attempt)


class Saved(Struct, frozen=True):
    """Stored state. ``started``: newest generation started here; ``ended``: newest whose end was reported."""

    boot: str
    assignment: Assignment | None = None
    run: JobRun | None = None
    started: int = -1
    ended: int = -1
    notice: Notice | None = None

    def write(self, folder: Path) -> None:
        """Write the file atomically. Raises OSError."""
        beneath.replace(folder, "agent.json", msgspec.json.encode(self), 0o600)

    @classmethod
    def read(cls, folder: Path, boot: str) -> Saved:
        """Return the state that an earlier agent of this boot stored, or an empty one."""
        with contextlib.suppress(OSError, msgspec.DecodeError):
            saved = codec.decode((folder / "agent.json").read_bytes(), cls)
            if saved.boot == boot:
                return saved
        return cls(boot)


class AgentState(Enum):
    """The agent's activity.

    ========== ========== ===========================================================
    from       to         when
    ========== ========== ===========================================================
    BOOT       HELLO      the settings are read
    HELLO      IDLE       the function answers that this static machine has no job
    HELLO      STANDBY    the function answers that the machine is an attempt of a node
    IDLE       STANDBY    a job is granted this machine
    STANDBY    RUNNING    a document lists the machine; source, launcher and disk are there
    RUNNING    SAVING     the document says SAVE_STOP, a deadline is near, the lease ends, or the machine shuts down
    RUNNING    RUNNING    a newer generation lists the machine: the old one is ended, the new one started
    RUNNING    STOPPED    the job ended by itself (reported as EXIT or RELEASED); its output is in the bucket
    SAVING     STOPPED    the processes have ended (reported as RELEASED)
    STOPPED    RUNNING    a newer generation lists the machine
    any        SUPERSEDED the machine is superseded or the job is done: the machine leaves the job (teardown.py)
    SUPERSEDED IDLE       the static machine has left its job; any other machine powers off
    ========== ========== ===========================================================
    """

    BOOT = "boot"
    HELLO = "hello"
    STANDBY = "standby"
    RUNNING = "running"
    SAVING = "saving"
    STOPPED = "stopped"
    SUPERSEDED = "superseded"
    IDLE = "idle"


class MachineState:
    """State of the running agent. ``saved``: the stored part; ``doc``: the newest document, if any."""

    def __init__(self, settings: Settings, sync: Syncer, clock: Clock, log: Log) -> None:
        self.settings = settings
        self.sync = sync
        self.clock = clock
        self.log = log
        self.saved = Saved.read(settings.run, settings.boot)
        self.state = AgentState.BOOT
        self.doc: Generation | None = None

    def become(self, state: AgentState) -> None:
        if state is not self.state:
            self.log("state", was=self.state.value, now=state.value)
            self.state = state
            notify(f"STATUS={state.value}")

    def save(self, **changes: object) -> None:
        """Change and store :attr:`saved`; if the disk is full, the change is kept in memory only."""
        saved = replace(self.saved, **changes)
        if saved == self.saved:
            return
        self.saved = saved
        try:
            saved.write(self.settings.run)
        except OSError as error:
            at = os.fspath(self.settings.run)
            self.log.once(f"saved {error.errno}", "state.trouble", error=str(error), at=at)

    def say(self, kind: Kind, value: str = "0", *, gen: int | None = None, again: bool = False) -> None:
        """Report a fact to the function, only once unless ``again`` is set.

        ``gen``: the fact's generation, by default the newest one known here.
        """
        self.sync.say(FactIn(kind, self.gen if gen is None else gen, value), again=again)

    @property
    def gen(self) -> int:
        return self.doc.gen if self.doc is not None else max(0, self.saved.started)

    @property
    def ver(self) -> int:
        """The newest document's version, or 0."""
        return self.doc.ver if self.doc is not None else 0

    @property
    def node(self) -> int:
        return self.saved.assignment.node if self.saved.assignment is not None else -1

    @property
    def job(self) -> str | None:
        return self.saved.assignment.job if self.saved.assignment is not None else None

    def member_of(self, doc: Generation) -> tuple[int, Member] | None:
        """Return index and entry of the member with this machine's uid and boot id; None if the document has none."""
        for index, member in enumerate(doc.members):
            if (member.uid, member.boot) == (self.settings.uid, self.settings.boot):
                return index, member
        return None

    def ckpt(self, job: str) -> Path:
        return self.settings.mount / job / "ckpt"

    def real(self, deadline: float | None) -> float | None:
        """Convert a virtual time to real unix seconds."""
        return None if deadline is None else time.time() + self.clock.real_s(deadline - self.clock.now())
