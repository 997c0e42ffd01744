"""How a run saves and restores: the interface of a strategy, and the strategy for replicated state.

With ``Replicated``, every node writes a full copy of the state that all ranks share, and each rank's own state.
``sharded.py`` has the strategy for sharded models.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from spotkeeper.train.agent_link.control import Commit, Control
from spotkeeper.train.checkpoint.client import new_manifest
from spotkeeper.train.checkpoint.image import Image, RunState, pack, unpack
from spotkeeper.train.checkpoint.manifest import IMAGE, Manifest, RankPlace
from spotkeeper.train.checkpoint.protocol import SaverState
from spotkeeper.train.checkpoint.restore import EarlyRead, restore
from spotkeeper.train.checkpoint.snapshot import BackgroundCopier
from spotkeeper.train.checkpoint.store import SkippedCheckpoint
from spotkeeper.train.checkpoint.writer import CheckpointWriter
from spotkeeper.train.core.errors import say
from spotkeeper.train.core.gang import Gang
from spotkeeper.train.core.settings import ARGV, own_argv
from spotkeeper.train.core.small_parts import PendingParts, SmallParts
from spotkeeper.version import __version__


@dataclass(frozen=True)
class ResumePoint:
    """The state from which a run continues."""

    model: object
    rest: Any
    local: dict[str, Any]  # this rank's own state, or rank 0's if the number of ranks has changed
    manifest: Manifest
    source: str  # "memory", "disk", or the ranks that sent it
    same_world: bool
    durable: bool = True  # False: it was an image in the savers' memories, and no disk has it


class StateSource(Protocol):
    """A provider of the state to save."""

    def take_common(self) -> tuple[object, dict[str, object]]:
        """Return (model parameters, other shared state).

        With replicated state both are equal on all ranks; with sharded state they are this rank's parts.
        """

    def take_local(self) -> dict[str, object]:
        """Return the state that each rank has for itself, such as its random generators."""

    def optimizer_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that only an optimizer's step changes, with their names."""


class SaveStrategy(Protocol):
    """How one run saves and restores.

    All methods except ``warm``, ``copying``, ``images``, ``next_image``, ``copied`` and ``ready`` are collective;
    ``settle`` is with sharded state.
    """

    def begin(
        self, folder: Path | None, hello: SaverState | None, early: EarlyRead | None = None
    ) -> tuple[ResumePoint | None, list[SkippedCheckpoint]]:
        """Restore the newest intact checkpoint of any rank; also return the checkpoints that were passed over."""

    def warm(self, subject: StateSource) -> None:
        """Reserve the saver's memory. Every rank calls this method, but ranks do not wait for each other."""

    def save(self, subject: StateSource, commit: Commit, *, overlap: bool = False) -> None:
        """Stage a save. ``overlap``: training continues at once; all ranks give the same.

        After it returns, optimizers' tensors may change in a step of these optimizers, but otherwise only after
        ``copied``. All other state may change at once.
        """

    @property
    def copying(self) -> bool:
        """Whether a save has not reached the savers yet, since its copies run or the ranks still compare them."""

    @property
    def images(self) -> bool:
        """Whether this rank keeps images of the state, and saves them."""

    def next_image(self) -> int | None:
        """Return the number of the memory that the next image fills; None if this rank can make no image now."""

    def image(self, subject: StateSource, commit: Commit) -> bool:
        """Keep an image of the state in the saver's memory; return whether one was begun, if this rank keeps images.

        Tensors of optimizers may not change, as after ``save``.
        """

    def advance(self) -> bool:
        """Take what several machines copy together one step on; return whether an image is still being copied.

        Called at each boundary.
        """

    def copied(self) -> None:
        """Wait until the last save no longer needs the state. Not collective."""

    def ready(self) -> bool:
        """Whether this rank has written a part that needs ``publish``."""

    def publish(self) -> None:
        """Request COMMIT for a sharded checkpoint that all savers have written, if any. Does not wait for COMMIT."""

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait until no save runs, then until COMMIT is written: at most ``timeout_s`` seconds for both together."""


class Replicated:
    """The strategy in which every node writes a full copy."""

    def __init__(
        self,
        gang: Gang,
        writer: CheckpointWriter,
        control: Control,
        places: tuple[RankPlace, ...],
        late: Path | None,
        copier: BackgroundCopier | None = None,
    ) -> None:
        """Make the strategy of one rank.

        ``late``: the checkpoint folder to use once this node's disk is mounted (``Control.disk_ready``). ``copier``:
        copies parameters and optimizer state while training continues; None: a save copies all before it returns.
        """
        self._gang = gang
        self._writer = writer
        self._control = control
        self._places = places
        self._late = late
        self._copier = copier
        self._small = SmallParts(gang)

    def begin(
        self, folder: Path | None, hello: SaverState | None, early: EarlyRead | None = None
    ) -> tuple[ResumePoint | None, list[SkippedCheckpoint]]:
        nodes = [place.node for place in sorted(self._places, key=lambda place: place.rank)]
        restored, skipped = restore(self._gang, folder, self._writer.client, hello, early, nodes)
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
        if writer.writes and not received and restored.durable:
            writer.has(manifest)
        rest: Any = state.rest
        rest["optimizers"] = state.optimizers
        return ResumePoint(state.model, rest, local, manifest, restored.source, same_world), skipped

    def warm(self, subject: StateSource) -> None:
        if self._writer.writes:
            size = Image(_state(subject, self._small.like(pack(subject.take_local())))).size
            self._writer.warm(size, images=self._copier is not None)

    def save(self, subject: StateSource, commit: Commit, *, overlap: bool = False) -> None:
        self.copied()
        local = self._small.exchange(pack(subject.take_local()), now=not overlap or self._copier is None)
        self._adopt_late_disk(commit)
        if self._writer.writes:
            manifest = new_manifest(commit, self._places, versions())
            self._writer.save(_state(subject, local), manifest, self._copier, subject.optimizer_tensors())

    @property
    def copying(self) -> bool:
        return False

    @property
    def images(self) -> bool:
        return self._copier is not None and self._writer.images

    def next_image(self) -> int | None:
        return None if self._copier is None else self._writer.next_image()

    def image(self, subject: StateSource, commit: Commit) -> bool:
        self.copied()
        local = self._small.exchange(pack(subject.take_local()), now=False)
        if self._copier is not None and self.next_image() is not None:
            manifest = new_manifest(commit, self._places, versions() | {IMAGE: "yes"})
            return self._writer.image(_state(subject, local), manifest, self._copier, subject.optimizer_tensors())
        return not self._writer.writes

    def advance(self) -> bool:
        """Ask whether devices have copied an image; each machine's is complete by itself."""
        if self._copier is not None:
            self._copier.poll()
        return False

    def copied(self) -> None:
        if self._copier is not None:
            self._copier.wait()

    def ready(self) -> bool:
        return False

    def publish(self) -> None:
        """Do nothing: each copy is complete by itself."""

    def settle(self, timeout_s: float | None = None) -> None:
        self.copied()
        self._writer.settle(timeout_s)

    def _adopt_late_disk(self, commit: Commit) -> None:
        """Write to this node's disk from this save on, if the disk was mounted after the start."""
        late = self._late
        if late is not None and not self._writer.writes and not self._gang.local_rank and self._control.disk_ready:
            self._writer.adopt(late)
            say(f"generation {commit.gen}: the disk is mounted and gets all checkpoints from step {commit.step} on")


def _state(subject: StateSource, local: PendingParts) -> RunState:
    model, rest = subject.take_common()
    return RunState(model, rest, (), rest.pop("optimizers", None), local)


def versions() -> dict[str, str]:
    found = {"spotkeeper": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
    return found | ({ARGV: argv} if (argv := own_argv()) else {})
