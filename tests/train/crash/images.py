"""Kills at the points of an image and of its write, and errors of the disk there; what is loaded is one step's state.

Generation 1 saves once, keeps images and ends without another save, or dies at a point of an image. Each saver then
writes its newest image, or dies, or its disk fails, at a point of that. Generation 2 starts from what is there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spotkeeper.train.agent_link.control import Commit
from tests.train.crash import oracle
from tests.train.crash.gang import NODES, Machines, Victim, _left, _told, machines
from tests.train.crash.plan import Names, spread
from tests.train.crash.points import KILL, SHORT
from tests.train.crash.saver_main import IMAGE
from tests.train.crash.trainer import IMAGED, SAVED, work_into_images

END = IMAGED + 4  # the last step
OLDEST = 3  # most steps between an image and the death of a trainer
POINTS = 12  # of each kind of process
FAULTS = ("ENOSPC+", "EIO", "EROFS+", SHORT)
FAULT_POINTS = 3


@dataclass(frozen=True)
class Cell:
    """One kill or error. ``point`` 0: nothing happens."""

    world: int
    victim: Victim
    point: int
    what: str = KILL


def attack(root: Path, cell: Cell) -> list[str]:
    """Run it; what was wrong."""
    with machines(root, cell.world) as gang:
        wrong = _first_life(gang, cell) or _second_life(gang, cell)
    if not wrong:
        shutil.rmtree(root)
    return wrong


def survey(root: Path, world: int) -> Names:
    """The points of images and of their writes where nothing happens, of each process."""
    with machines(root, world) as gang:
        if wrong := _first_life(gang, Cell(world, Victim("trainer", 0), 0)):
            raise RuntimeError(f"{wrong}; see {root}")
    found = {Victim("trainer", rank): root / f"points-trainer{rank}" for rank in range(world)}
    found |= {Victim("saver", node): gang.points(node) for node in gang.nodes}
    return {victim: json.loads(path.read_text()) for victim, path in found.items()}


def cells(world: int, names: Names) -> Iterator[Cell]:
    for what in ("trainer", "saver"):
        reached = sorted(
            ((point, victim) for victim in names if victim.what == what for point in range(1, len(names[victim]) + 1)),
            key=lambda each: (each[0], each[1].number),
        )
        yield from (Cell(world, victim, point) for point, victim in spread(reached, POINTS))
    disk = Victim("saver", 0)
    for what in FAULTS:
        fit = [at for at, name in enumerate(names[disk], 1) if name not in ("asked", "close", "done")]
        halves = [at for at in fit if names[disk][at - 1].endswith("half")]
        yield from (Cell(world, disk, at, what) for at in spread(halves if what == SHORT else fit, FAULT_POINTS))


def whole(root: Path) -> dict[int, list[Cell]]:
    """All cells by the number of ranks."""
    return {world: list(cells(world, survey(root / f"images{world}", world))) for world in NODES}


def _first_life(gang: Machines, cell: Cell) -> list[str]:
    victim, trainer = cell.victim, cell.victim.what == "trainer"
    gang.start_savers(IMAGE, (-1 if trainer else victim.number, cell.point, cell.what))
    dies = {victim.number: cell.point} if trainer and cell.point else {}
    codes = gang.run(1, (END,), dies, work_into_images)
    for node in gang.nodes:
        gang.quiet(node)
    return [] if dies else [f"generation 1: rank {rank} ended with {code}" for rank, code in enumerate(codes) if code]


def _second_life(gang: Machines, cell: Cell) -> list[str]:
    before = {node: oracle.look(disk) for node, disk in enumerate(gang.disks)}
    newest = oracle.newest(gang.disks)
    if newest is None:
        return [f"the save of step {SAVED} has gone"]
    saver = cell.victim.what == "saver"
    lost = saver and len(gang.disks) == 1
    least = SAVED if lost else (END if saver else IMAGED) - OLDEST
    wrong = [] if newest.step >= least else [f"the newest is {newest}, want step {least} or later"]
    if cell.what != KILL and not cell.what.endswith("+"):  # on a disk that goes on failing, the next start clears up
        wrong += [f"{each} was left on a disk that failed" for found in before.values() for each in found if each.why]
    if lost:  # after an error too: a saver that lives on still offers its image, and its disk may go on failing
        gang.end_saver(0)
    gang.start_savers(-1)
    then = newest.step + 2
    codes = gang.run(2, (then,), {})
    wrong += [f"generation 2: rank {rank} ended with {code}" for rank, code in enumerate(codes) if code]
    for rank in range(gang.world):
        seen = gang.seen(2, rank)
        if seen["step"] != newest.step:
            wrong.append(f"rank {rank} began at step {seen['step']}, the newest is {newest}")
        wrong += [f"rank {rank}, step {seen['step']}: {what}" for what in seen["wrong"]]
    wrong += _told(gang, before)[1]
    for node, disk in enumerate(gang.disks):
        gang.quiet(node)
        wrong += _left(disk, Commit(2, then))
    return wrong
