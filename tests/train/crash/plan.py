"""Which crashes are tried: points of every process of a save x what is kept x ranks; errors of the disk beside them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import TypeVar

from tests.train.crash.gang import NODES, SLOTS, Cell, Victim, machines
from tests.train.crash.points import KILL, SHORT

POINTS = 50  # of each process
FAULT_POINTS = 8
FAULTS = ("ENOSPC", "ENOSPC+", "EIO", "EIO+", "EROFS", "EROFS+", SHORT)
NO_DISK = ("asked", "answer", "close", "done")  # points that are no call that a disk may refuse
Names = dict[Victim, list[str]]
T = TypeVar("T")


def survey(root: Path, world: int, slot: str) -> Names:
    """The points of a save that is left alone, of each of its processes."""
    cell = Cell(world, slot, Victim("trainer", 0), 0)
    with machines(root, world) as gang:
        gang.images = slot == "image"
        gang.start_savers(cell.saves[-1])
        codes = gang.run(1, cell.saves, {})
        if any(codes):
            raise RuntimeError(f"a save that nobody hurts: exit codes {codes}; see {root}")
    found = {Victim("trainer", rank): root / f"points-trainer{rank}" for rank in range(world)}
    found |= {Victim("saver", node): gang.points(node) for node in gang.nodes}
    return {victim: json.loads(path.read_text()) for victim, path in found.items()}


def kills(world: int, slot: str, names: Names, count: int = POINTS) -> Iterator[Cell]:
    """``count`` points of the trainers and as many of the savers, evenly from first to last, all members in turn."""
    for what in ("trainer", "saver"):
        members = [victim for victim in names if victim.what == what]
        reached = sorted((point, victim.number, victim) for victim in members for point in _points(names[victim]))
        for point, _, victim in spread(reached, count):
            yield Cell(world, slot, victim, point)


def faults(world: int, names: Names, count: int = FAULT_POINTS) -> Iterator[Cell]:
    """Each error at ``count`` points of a saver's calls, of all nodes in turn."""
    for number, what in enumerate(FAULTS):
        victim = Victim("saver", number % NODES[world])
        fit = [point for point in _points(names[victim]) if _fits(names[victim][point - 1], what)]
        for point in spread(fit, count):
            yield Cell(world, "last", victim, point, what)


def whole(seed: int, root: Path) -> tuple[list[Cell], dict[str, int]]:
    """All cells, in an order that a bound in time cuts evenly; and how many points each save has."""
    cells, found = [], {}
    for world, slot in product(NODES, SLOTS):
        names = survey(root / f"{world}{slot}", world, slot)
        found |= {f"{world} {'rank' if world == 1 else 'ranks'}, {slot}, {v}": len(names[v]) for v in names}
        cells += kills(world, slot, names)
        if slot == "last":
            cells += faults(world, names)
    random.Random(seed).shuffle(cells)  # noqa: S311 - an order
    return cells, found


def _points(names: list[str]) -> range:
    return range(1, len(names) + 1)


def _fits(name: str, what: str) -> bool:
    return name.endswith("half") if what == SHORT else name not in NO_DISK


def spread(among: list[T], count: int) -> list[T]:
    if len(among) <= count:
        return among
    return [among[round(at * (len(among) - 1) / (count - 1))] for at in range(count)]


__all__ = ["FAULTS", "KILL", "POINTS", "faults", "kills", "spread", "survey", "whole"]
