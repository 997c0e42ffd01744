"""Losses at the points of an image of sharded state and of its copies: of a trainer, a saver, a machine with its disk.

Generation 1 saves once, keeps images in neighbours' memories, and ends without another save, or loses somebody at a
point of an image. Generation 2 starts from what is left. The judge reads the surviving savers' memories and disks by
rules of its own, and says which step must be the newest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.train.crash import oracle
from tests.train.crash.gang import Machines, Victim, machines
from tests.train.crash.plan import Names, spread
from tests.train.crash.sharded_trainer import CUT, LAST, SAVED, work_with_peers
from tests.train.crash.trainer import AREA

SIZES = ((2, 2), (4, 4), (4, 2))  # ranks, machines
POINTS = 10  # of each kind of loss
TRAINER, SAVER, MACHINE = "trainer", "saver", "machine"
LOSSES = (TRAINER, SAVER, MACHINE)


@dataclass(frozen=True)
class Cell:
    """One loss. ``rank``: whose point it is. ``point`` 0: the machine is lost after the end of generation 1."""

    world: int
    nodes: int
    rank: int
    point: int
    lost: str


def survey(root: Path, world: int, nodes: int) -> Names:
    """The points of images where nothing happens, of each rank."""
    with machines(root, world, nodes) as gang:
        gang.start_savers(-1)
        codes = gang.run(1, (LAST,), {}, work_with_peers)
        if any(codes):
            raise RuntimeError(f"exit codes {codes}; see {root}")
    return {Victim(TRAINER, rank): json.loads((root / f"points-trainer{rank}").read_text()) for rank in range(world)}


def cells(world: int, nodes: int, names: Names, count: int = POINTS) -> Iterator[Cell]:
    """``count`` points for each kind of loss, evenly from first to last, all ranks in turn."""
    reached = sorted((point, victim.number) for victim in names for point in range(1, len(names[victim]) + 1))
    for shift, lost in enumerate(LOSSES):
        for point, rank in spread(reached[shift:], count):
            yield Cell(world, nodes, rank, point, lost)


def whole(root: Path) -> dict[tuple[int, int], list[Cell]]:
    """All cells by ranks and machines."""
    return {size: list(cells(*size, survey(root / f"peers{size[0]}-{size[1]}", *size))) for size in SIZES}


def attack(root: Path, cell: Cell) -> list[str]:
    """Run it; what was wrong."""
    with machines(root, cell.world, cell.nodes) as gang:
        wrong = _first_life(gang, cell)
        wrong += _second_life(gang, *_left(gang))
    if not wrong:
        shutil.rmtree(root)
    return wrong


def cut(root: Path, world: int, nodes: int) -> list[str]:
    """A link is cut, without an error: training goes on to its end and saves, and the log says that peers are off."""
    with machines(root, world, nodes) as gang:
        (gang.root / CUT).touch()
        gang.start_savers(-1)
        codes = gang.run(1, (LAST,), {}, work_with_peers)
        wrong = [f"rank {rank} ended with {code}" for rank, code in enumerate(codes) if code]
        for rank in (gang.first_rank(node) for node in gang.nodes):
            if "peers are off for the rest of this run: a copy between" not in gang.log(1, rank):
                wrong.append(f"rank {rank} did not say that peers are off: {gang.log(1, rank)}")
        wrong += [f"{disk}: no 1-{LAST}" for disk in gang.disks if f"1-{LAST}" not in map(_name, oracle.whole(disk))]
    return wrong


def _name(found: oracle.Found) -> str:
    return found.name


def _first_life(gang: Machines, cell: Cell) -> list[str]:
    gang.start_savers(-1)
    codes = gang.run(1, (LAST,), {cell.rank: -cell.point if cell.lost == SAVER else cell.point}, work_with_peers)
    node = cell.rank // (cell.world // cell.nodes)
    if cell.lost == MACHINE:
        gang.lose(node)
    for each in gang.nodes:
        gang.quiet(each)
    if cell.lost == SAVER or not cell.point:
        return [f"generation 1: rank {rank} ended with {code}" for rank, code in enumerate(codes) if code]
    return []


def _left(gang: Machines) -> tuple[int, int]:
    """Return the newest step that is left whole, and the oldest that may be: of the image before the last begun one."""
    parts: dict[tuple[int, int, str], set[int]] = defaultdict(set)
    for pid in gang.saver_pids():
        for size, fd in _memories(pid):
            for key, ranks in _sealed(fd, size):
                parts[key] |= ranks
    for disk in gang.disks:
        for found in oracle.whole(disk):
            key, ranks = _manifest(json.loads((disk / found.name / "COMMIT").read_text()))
            parts[key] |= ranks
    newest = max((key[:2] for key, ranks in parts.items() if ranks == set(range(gang.world))), default=(0, 0))[1]
    steps = {int(step) for path in gang.root.glob("begun1-*") for step in path.read_text().split()}
    return newest, sorted((0, 0, *steps))[-2]


def _memories(pid: int) -> Iterator[tuple[int, int]]:
    """The memory files of a process: sizes, and descriptors that are open while they are looked at."""
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if "memfd:spotkeeper" in str(path.readlink()):
                fd = os.open(path, os.O_RDONLY)
                try:
                    yield os.fstat(fd).st_size, fd
                finally:
                    os.close(fd)


def _sealed(fd: int, size: int) -> Iterator[tuple[tuple[int, int, str], set[int]]]:
    head = os.pread(fd, 40, max(0, size - AREA))
    text = os.pread(fd, int.from_bytes(head[32:40], "little") % AREA, max(0, size - AREA) + 40)
    if text and hashlib.sha256(text).digest() == head[:32]:
        save = json.loads(text)
        if save["part"]:
            key, _ = _manifest(json.loads(save["manifest"]))
            yield key, {rank for each in save["stretches"] if (rank := _rank(each["name"])) is not None}


def _manifest(manifest: dict[str, Any]) -> tuple[tuple[int, int, str], set[int]]:
    body = manifest["body"]
    key = body["commit"]["gen"], body["commit"]["step"], body["versions"]["save"]
    return key, {rank for file in body["files"] if (rank := _rank(file["name"])) is not None}


def _rank(name: str) -> int | None:
    return int(name.removeprefix("__").partition("_")[0]) if name.endswith(".distcp") else None


def _second_life(gang: Machines, newest: int, least: int) -> list[str]:
    in_memory = newest > SAVED
    wrong = [] if newest >= least else [f"step {newest} is left, want step {least} or later"]
    gang.start_savers(-1)
    then = newest + 4
    codes = gang.run(2, (then,), {}, work_with_peers)
    wrong += [f"generation 2: rank {rank} ended with {code}" for rank, code in enumerate(codes) if code]
    for rank in range(gang.world):
        seen = gang.seen(2, rank)
        if seen["step"] != newest:
            wrong.append(f"rank {rank} began at step {seen['step']}, the newest is {newest}")
        wrong += [f"rank {rank}, step {seen['step']}: {what}" for what in seen["wrong"]]
    for node, disk in enumerate(gang.disks):
        gang.quiet(node)
        saved = [each.step for each in oracle.whole(disk) if each.gen == 2]
        if then not in saved:
            wrong.append(f"{disk}: no 2-{then}, only {oracle.look(disk)}")
        if in_memory and len(saved) != 2:
            wrong.append(f"{disk}: the restored image was not saved at once: {saved}")
    return wrong
