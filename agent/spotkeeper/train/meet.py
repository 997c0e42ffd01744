"""The first words of a gang: who is where, whose folder is whose, and which generation this is. Collective."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from spotkeeper.train.gang import Gang
from spotkeeper.train.settings import Settings, lock
from spotkeeper.train.store import Place, scan


@dataclass(frozen=True)
class Met:
    """What all ranks know of each other. ``folder``: this node's checkpoints, None where it writes none."""

    gen: int
    folder: Path | None
    places: tuple[Place, ...]
    lock: IO[str] | None  # of the folder, for as long as this is held

    def beside(self, node: int) -> tuple[int, ...]:
        """The ranks of one machine."""
        return tuple(place.rank for place in self.places if place.node == node)


def meet(gang: Gang, settings: Settings) -> Met:
    """
    Raises:
        RuntimeError: another run has the folder.
    """
    folder, held = _own_folder(gang, settings)
    there = scan(folder) if folder else []
    slot = gang.node if settings.slot is None else settings.slot
    place = Place(gang.rank, gang.node, slot, folder is not None)
    words = {"top": there[0].gen if there else -1, "place": asdict(place)}
    peers = [json.loads(blob) for blob in gang.gather(json.dumps(words).encode())]
    gen = settings.gen if settings.gen is not None else 1 + max(peer["top"] for peer in peers)
    return Met(gen, folder, tuple(Place(**peer["place"]) for peer in peers), held)


def _own_folder(gang: Gang, settings: Settings) -> tuple[Path | None, IO[str] | None]:
    folder = settings.folder
    if settings.managed or folder is None:
        return folder, None
    if len(set(gang.gather(str(gang.node).encode()))) > 1:
        folder = folder / f"node{gang.node}"  # several machines may share this file system
    return folder, None if gang.local_rank else lock(folder)
