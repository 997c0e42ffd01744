"""How a run's state is kept: what a save, a beginning and an end of a save are. Collective.

State is replicated (each node writes a full copy of what all ranks have in common, with
every rank's own part in it) or sharded (``sharded``). Which, says the model. A run knows
no other difference.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from spotkeeper import __version__
from spotkeeper.train.checkpoint import Image, State, pack, unpack
from spotkeeper.train.client import Hello, new_manifest
from spotkeeper.train.control import Commit, Control
from spotkeeper.train.gang import Gang
from spotkeeper.train.restore import restore
from spotkeeper.train.store import Manifest, Place, Skipped
from spotkeeper.train.writer import Writer, say

SAVE = "save"  # in a manifest's versions: what all parts of one save of sharded state have in common


@dataclass(frozen=True)
class Found:
    """What a run goes on from.

    ``local``: this rank's own part; where the number of ranks has changed, rank 0's.
    ``source``: "memory", "disk", or which ranks sent it.
    """

    model: object
    rest: Any
    local: dict[str, Any]
    manifest: Manifest
    source: str
    same_world: bool


class Subject(Protocol):
    """What is kept."""

    def take_common(self) -> tuple[object, dict[str, object]]:
        """(the model, the rest): the same on all ranks, or this rank's parts of it."""

    def take_local(self) -> dict[str, object]:
        """This rank's own."""


class Keeper(Protocol):
    """Of one run. All methods but ``warm`` and ``ready`` are collective."""

    def begin(self, folder: Path | None, hello: Hello | None) -> tuple[Found | None, list[Skipped]]:
        """The best state that there is, and what was passed over."""

    def warm(self, subject: Subject) -> None:
        """Have the saver's memory made ready for it. Called by every rank, not collective."""

    def save(self, subject: Subject, commit: Commit) -> None:
        """Stage it. Returns when the state may change again."""

    def ready(self) -> bool:
        """Whether this rank has written a part, that ``publish`` is to complete."""

    def publish(self) -> None:
        """Complete it, now that nobody is busy. Does not wait."""

    def settle(self, timeout_s: float | None = None) -> None:
        """Until nothing is being written and all is complete, or ``timeout_s`` have passed."""


class Replicated:
    """Every node has a full copy."""

    def __init__(
        self, gang: Gang, writer: Writer, control: Control, places: tuple[Place, ...], late: Path | None
    ) -> None:
        """``late``: where this node's checkpoints go once the control file says that its disk is there."""
        self._gang = gang
        self._writer = writer
        self._control = control
        self._places = places
        self._late = late

    def begin(self, folder: Path | None, hello: Hello | None) -> tuple[Found | None, list[Skipped]]:
        restored, skipped = restore(self._gang, folder, self._writer.client, hello)
        if restored is None:
            return None, skipped
        state, manifest, writer = restored.state, restored.manifest, self._writer
        same_world = manifest.world == self._gang.world
        local = unpack(state.local[self._gang.rank if same_world else 0])
        received = restored.source.startswith("rank")
        if restored.lost is not None:
            writer.lose(restored.lost)
        elif received:
            writer.copy(manifest, restored.stretches)
        if writer.writes and not received:
            writer.has(manifest)
        return Found(state.model, state.rest, local, manifest, restored.source, same_world), skipped

    def warm(self, subject: Subject) -> None:
        if self._writer.writes:
            model, rest = subject.take_common()
            local = pack(subject.take_local())
            self._writer.warm(Image(State(model, rest, (local,) * self._gang.world)).size)

    def save(self, subject: Subject, commit: Commit) -> None:
        local = self._gang.gather(pack(subject.take_local()))
        self._adopt_late_disk(commit)
        if self._writer.writes:
            model, rest = subject.take_common()
            self._writer.save(State(model, rest, tuple(local)), new_manifest(commit, self._places, versions()))

    def ready(self) -> bool:
        return False

    def publish(self) -> None:
        """A copy is complete by itself."""

    def settle(self, timeout_s: float | None = None) -> None:
        self._writer.settle(timeout_s)

    def _adopt_late_disk(self, commit: Commit) -> None:
        """A member may begin without its disk; its first save after the disk came makes a full copy there."""
        late = self._late
        if late is not None and not self._writer.writes and not self._gang.local_rank and self._control.disk:
            self._writer.adopt(late)
            say(f"generation {commit.gen}: the disk is here, checkpoints go to it from step {commit.step} on")


def versions() -> dict[str, str]:
    return {"spotkeeper": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
