"""Kills at the points of a hand-over: from the loss of a generation to the state with which a later one begins.

Generation 1 keeps images and ends without a save. Then a trainer of generation 2 dies at a point of its ``attach``, or
a saver at a point of its image's write, or generation 1 is not ended, as after the death of an agent: its trainers are
stopped and stay connected; or these stay, and the trainers of generation 2 die once their savers have allocated memory
for the first image. The next generation must begin with the newest state that any machine has, in memory or on
disk, by a judge that shares no code with the library.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

from tests.train.crash import oracle
from tests.train.crash.gang import NODES, Machines, Victim, machines
from tests.train.crash.images import END, OLDEST, Cell
from tests.train.crash.plan import spread
from tests.train.crash.saver_main import IMAGE
from tests.train.crash.trainer import work_from_image, work_into_images, work_until_warm

POINTS = 12  # of each kind of process
WARM = 1  # the point of an agent's cell at which generation 2 dies too, once its savers have memory for an image


def survey(root: Path, world: int) -> dict[Victim, list[str]]:
    """The points of a hand-over where nothing happens."""
    with machines(root, world) as gang:
        gang.start_savers(IMAGE)
        gang.run(1, (END,), {}, work_into_images)
        for rank in range(world):
            (root / f"points-trainer{rank}").unlink()
        if any(codes := gang.run(2, (END + 2,), {}, work_from_image)):
            raise RuntimeError(f"a hand-over that nobody hurts: exit codes {codes}; see {root}")
    found = {Victim("trainer", rank): root / f"points-trainer{rank}" for rank in range(world)}
    found |= {Victim("saver", node): gang.points(node) for node in gang.nodes}
    return {victim: json.loads(path.read_text()) for victim, path in found.items()}


def cells(world: int, names: dict[Victim, list[str]]) -> Iterator[Cell]:
    for what in ("trainer", "saver"):
        reached = [(at, victim) for victim in names if victim.what == what for at in range(1, len(names[victim]) + 1)]
        reached.sort(key=lambda each: (each[0], each[1].number))
        yield from (Cell(world, victim, point) for point, victim in spread(reached, POINTS))
    yield from (Cell(world, Victim("agent", 0), point) for point in (0, WARM))


def whole(root: Path) -> dict[int, list[Cell]]:
    """All cells by the number of ranks."""
    return {world: list(cells(world, survey(root / f"handover{world}", world))) for world in NODES}


def attack(root: Path, cell: Cell) -> list[str]:
    """Run it; what was wrong."""
    victim = cell.victim
    with machines(root, cell.world) as gang:
        gang.start_savers(IMAGE, (victim.number if victim.what == "saver" else -1, cell.point, cell.what))
        held = gang.run_held(1, (END,), work_into_images) if victim.what == "agent" else []
        if not held:
            gang.run(1, (END,), {}, work_into_images)
        judged = _newest(gang)
        survivors = [node for node in gang.nodes if victim != Victim("saver", node)]
        fit = {judged, _newest(gang, survivors)}  # a saver that dies takes its memory along, now or later
        if victim.what == "trainer":
            gang.run(2, (END + 2,), {victim.number: cell.point}, work_from_image)
            fit = {judged}
        if held and cell.point == WARM:
            if set(codes := gang.run(2, (END + 2,), {}, work_until_warm)) != {-signal.SIGKILL}:
                raise RuntimeError(f"generation 2 did not come to its death: {codes}; see {root}")
            fit = {judged}
        gang.start_savers(-1)
        codes = gang.run(3, (END + 3,), {})
        wrong = [f"generation 3: rank {rank} ended with {code}" for rank, code in enumerate(codes) if code]
        steps = {gang.seen(3, rank)["step"] for rank in range(cell.world)}
        if len(steps) != 1 or not steps <= {found.step for found in fit if found}:
            wrong.append(f"began at steps {steps}, the newest is {fit}")
        wrong += [f"rank {rank}: {what}" for rank in range(cell.world) for what in gang.seen(3, rank)["wrong"]]
        for process in held:
            os.kill(process.pid, signal.SIGCONT)
            process.kill()
            process.join()
        if survivors and (judged is None or judged.step < END - OLDEST):  # the only saver takes all images along
            wrong.append(f"the newest is {judged}, want step {END - OLDEST} or later")
        for node in survivors:  # another saver may have died after the last hello
            gang.quiet(node)
            found = oracle.look(gang.disks[node])
            wrong += [f"node {node}: {each} is left incomplete" for each in found if each.why]
    if not wrong:
        shutil.rmtree(root)
    return wrong


def _newest(gang: Machines, nodes: list[int] | None = None) -> oracle.Found | None:
    """The newest state of some machines, in memory or on disk; by default of all."""
    there = list(gang.nodes) if nodes is None else nodes
    found = [oracle.newest(gang.disks)] + [each for node in there for each in oracle.in_memory(gang.saver_pid(node))]
    return max((each for each in found if each), default=None)
