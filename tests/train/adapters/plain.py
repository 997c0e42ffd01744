"""One story for both frameworks: a gang trains, one machine gets a notice, and the next generation goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotkeeper.contract.metrics import read_metrics
from spotkeeper.report.job.metrics import joined
from spotkeeper.train.agent_link.control import METRICS
from spotkeeper.train.checkpoint import snapshot
from spotkeeper.train.core import pace
from tests.train.checkpoint.test_snapshot import LatestCopier
from tests.train.gangs import Gang, Job

HERE = Path(__file__).parent
COPIED = "copied while it trained"


@dataclass(frozen=True)
class Case:
    """``stop``: optimizer steps after which the last rank's machine gets the notice."""

    args: tuple[str, ...] = ()
    stop: int = 7
    world: int = 1

    def __str__(self) -> str:
        return "-".join([*(arg.lstrip("-") for arg in self.args), f"stop{self.stop}", f"world{self.world}"])


def left_alone(root: Path, script: str, case: Case) -> dict[str, str]:
    """What the script leaves: each rank's final state, and what happened on the way."""
    with _gang(root, script, case) as gang:
        _run(gang, 1, "done")
    return _left(root)


def preempted(root: Path, script: str, case: Case) -> dict[str, str]:
    """The same where it was told to stop once: all ranks at one step, and what follows the training did not run.

    Each save point has an image, whose copy ends only when an optimizer's step waits for it.
    """
    notice = ("--stop-at", str(case.stop), "--stop-rank", str(case.world - 1))
    with _gang(root, script, case, *notice, before=_late_images) as gang:
        step = _run(gang, 1, "stopped")
        assert case.stop < 6 or COPIED in gang.log(0, 1), gang.log(0, 1)
        assert case.stop <= step <= case.stop + 2, "all hear of it within a step or two"
        assert not list((root / "out").glob("*.json"))
        _run(gang, 2, "done")
    return _left(root)


def restarted_after_its_end(root: Path, script: str, case: Case) -> tuple[dict[str, str], str]:
    """The same where the machine is lost after the training: only what follows is done again. And what it said."""
    with _gang(root, script, case) as gang:
        _run(gang, 1, "done")
        for path in (root / "out").glob("*.json"):
            path.unlink()
        _run(gang, 2, "done")
        return _left(root), gang.log(0, 2)


def curves(root: Path) -> dict[str, list[int]]:
    """The steps of each metric that the two generations left behind, as if the first had reached the bucket late."""
    runs = {gen: root / "node0" / f"run{gen}" / METRICS for gen in (1, 2)}
    found = joined(read_metrics(file.read_bytes(), gen) for gen, file in runs.items() if gen == 2)
    assert found == joined(read_metrics(file.read_bytes(), gen) for gen, file in runs.items())
    return {name: curve.steps for name, curve in found.items()}


def fails(root: Path, script: str, case: Case) -> str:
    """What the first rank says at its end."""
    with _gang(root, script, case) as gang:
        assert all(each.code for each in gang.run(1))
        return gang.log(0, 1)


def _gang(root: Path, script: str, case: Case, *more: str, before: Callable[[], None] | None = None) -> Gang:
    argv = (str(HERE / script), "--out", str(root / "out"), *case.args, *more)
    return Gang(root, Job(root / "out"), nodes=case.world, script=argv, before=before)


def _late_images() -> None:
    class Told(LatestCopier):
        def submit(self, work: Callable[[Any], None], what: Any) -> Future[None]:
            def copy(what: Any) -> None:
                print(COPIED, flush=True)
                work(what)

            return super().submit(copy, what)

    os.environ["SPOTKEEPER_SNAPSHOTS"] = "1"
    snapshot.CHECKED = 1
    snapshot.ThreadPoolExecutor = lambda *_: Told()  # type: ignore[assignment, misc]
    pace.SavePace.image_interval_s = 0.0  # type: ignore[assignment]


def copies(root: Path, script: str, case: Case) -> list[str]:
    """The lines after each copy of an image that the script's optimizer waited for."""
    with _gang(root, script, case, before=_late_images) as gang:
        _run(gang, 1, "done")
        lines = gang.log(0, 1).splitlines()
    found = [lines[at + 1] for at, line in enumerate(lines[:-1]) if line == COPIED]
    assert found, lines
    return found


def _run(gang: Gang, gen: int, outcome: str) -> int:
    """One generation; the step at which all of its ranks ended in this way, their last state durable."""
    ended = gang.run(gen)
    said = "\n".join(gang.log(node, gen) for node in range(gang.nodes))
    assert [each.code for each in ended] == [0] * gang.nodes, said
    results = [each.result for each in ended if each.result is not None]
    assert [each.outcome for each in results] == [outcome] * gang.nodes, said
    assert all(each.commit is not None and each.commit.step == each.step for each in results), said
    assert len({each.step for each in results}) == 1, said
    return results[0].step


def _left(root: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted((root / "out").iterdir())}
