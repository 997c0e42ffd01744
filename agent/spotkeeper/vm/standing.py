"""Where this machine stands: what it is, by the function's last word, and what it says of itself.

The one place that the agent's parts share: what is written down for the next agent (``saved.py``), the newest
document, the state, and the word to the function. It decides nothing, and starts and ends nothing.
"""

from __future__ import annotations

import os
import time
from enum import Enum
from pathlib import Path

from msgspec.structs import replace

from spotkeeper.clock import Clock
from spotkeeper.spec.facts import Kind
from spotkeeper.spec.generation import FactIn, Generation, Member
from spotkeeper.vm.log import Log
from spotkeeper.vm.saved import Saved
from spotkeeper.vm.sdnotify import notify
from spotkeeper.vm.settings import Settings
from spotkeeper.vm.sync import Syncer


class State(Enum):
    """What this machine is doing.

    ========== ========== ===========================================================
    from       to         on
    ========== ========== ===========================================================
    BOOT       HELLO      the settings are read
    HELLO      IDLE       the function knows it as a static node without a job
    HELLO      STANDBY    the record knows it as an attempt of a rank
    IDLE       STANDBY    a job was granted this node
    STANDBY    RUNNING    a document lists it, and source, launcher and disk are there
    RUNNING    SAVING     save_stop; its own notice runs out; lease over; machine going down
    RUNNING    RUNNING    a newer generation lists it: end the old one, start the new one
    RUNNING    STOPPED    the job ended by itself (said as exit, or released); what it left is in the bucket
    SAVING     STOPPED    the processes are gone (said as released)
    STOPPED    RUNNING    a newer generation lists it
    any        SUPERSEDED superseded or done: end, unmount, say freed (static: dropped)
    SUPERSEDED IDLE       a static node has said dropped; any other machine powers off
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


class Standing:
    """``saved``: what an agent after this one must know; ``doc``: the newest document, if any."""

    def __init__(self, settings: Settings, sync: Syncer, clock: Clock, log: Log) -> None:
        self.settings = settings
        self.sync = sync
        self.clock = clock
        self.log = log
        self.saved = Saved.read(settings.run, settings.boot)
        self.state = State.BOOT
        self.doc: Generation | None = None

    def become(self, state: State) -> None:
        if state is not self.state:
            self.log("state", was=self.state.value, now=state.value)
            self.state = state
            notify(f"STATUS={state.value}")

    def save(self, **changes: object) -> None:
        """Write down what has changed; on a disk that takes nothing it is known until the agent ends."""
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
        """A fact for the function; ``gen`` None is the newest generation that is known here."""
        self.sync.say(FactIn(kind, self.gen if gen is None else gen, value), again=again)

    @property
    def gen(self) -> int:
        return self.doc.gen if self.doc is not None else max(0, self.saved.started)

    @property
    def ver(self) -> int:
        """Of the newest document, 0 where there is none."""
        return self.doc.ver if self.doc is not None else 0

    @property
    def rank(self) -> int:
        return self.saved.assignment.rank if self.saved.assignment is not None else -1

    @property
    def job(self) -> str | None:
        return self.saved.assignment.job if self.saved.assignment is not None else None

    def place(self, doc: Generation) -> tuple[int, Member] | None:
        """This machine's place in a document; another boot of it is another member."""
        for index, member in enumerate(doc.members):
            if (member.uid, member.boot) == (self.settings.uid, self.settings.boot):
                return index, member
        return None

    def ckpt(self, job: str) -> Path:
        return self.settings.mount / job / "ckpt"

    def real(self, deadline: float | None) -> float | None:
        """A virtual time as real unix seconds."""
        return None if deadline is None else time.time() + self.clock.real_s(deadline - self.clock.now())
