"""Where the world changes: the same batches, the same loss curve, and no script that trains wrongly unnoticed."""

from __future__ import annotations

import json
import os
import random
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.sizes import size
from tests.train.gangs import Gang, Job, finals

SCRIPT = str(Path(__file__).with_name("elastic_job.py"))
STEPS = 12
# Seven micro-batches, the last one smaller: no world but 1 and 7 divides them. Two: some ranks have none.
SPLITS = {"uneven": ("--batch", "20", "--micro", "3"), "ranks-without": ("--batch", "6", "--micro", "3")}


def script(out: Path, split: str, *more: str) -> tuple[str, ...]:
    return (SCRIPT, str(out), "--steps", str(STEPS), *SPLITS[split], *more)


def curve(out: Path, steps: int = STEPS) -> list[float]:
    """The loss of each step, in order."""
    lines = [line.split() for line in (out / "curve").read_text().splitlines()]
    assert [int(step) for step, _ in lines] == list(range(1, steps + 1)), "every step once"
    return [float.fromhex(loss) for _, loss in lines]


def alone(root: Path, split: str, world: int) -> Path:
    """Left alone, in a fixed world; where its curve and final states are."""
    out = root / "out"
    with Gang(root, Job(out), nodes=world, script=script(out, split)) as gang:
        ended = gang.run(1)
        assert [each.code for each in ended] == [0] * world, gang.log(0, 1)
    return out


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs left alone, by split and world, made once."""
    root = tmp_path_factory.mktemp("fixed")
    made: dict[tuple[str, int], Path] = {}

    def get(split: str, world: int) -> Path:
        key = (split, world)
        if key not in made:
            made[key] = alone(root / f"{split}{world}", split, world)
        return made[key]

    return get


def apart(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("split", "world"), size([("uneven", 4), ("ranks-without", 3)], list(product(SPLITS, (2, 3, 4))))
)
def test_every_world_has_the_same_loss_curve(fixed: Any, split: str, world: int, record_property: Any) -> None:
    one = curve(fixed(split, 1))
    difference = apart(one, curve(fixed(split, world)))
    record_property("difference", difference)
    print(f"{split}, world {world}: {difference:.3g}")
    assert difference <= 1e-6
    assert len(set(one)) == STEPS, "it trains"


@pytest.mark.parametrize(("split", "seed"), size([("ranks-without", 2)], list(product(SPLITS, (1, 2)))))
def test_a_changing_world_has_the_same_loss_curve(tmp_path: Path, fixed: Any, split: str, seed: int) -> None:
    """Stopped at random steps, and started again with another number of ranks."""
    chance = random.Random(seed)  # noqa: S311
    worlds = chance.sample([1, 2, 3, 4], 4)
    stops = [*sorted(chance.sample(range(1, STEPS - 3), 3)), 0]
    out = tmp_path / "out"
    with Gang(tmp_path, Job(out), nodes=4) as gang:
        for gen, (world, stop) in enumerate(zip(worlds, stops, strict=True), 1):
            gang.nodes = world
            gang.script = script(out, split, "--stop-at", str(stop))
            assert [ended.code for ended in gang.run(gen)] == [0] * world, gang.log(0, gen)
    difference = apart(curve(fixed(split, 3)), curve(out))
    print(f"{split}, worlds {worlds}: {difference:.3g}")
    assert difference <= 1e-6
    weights = {json.loads(final)["weights"] for final in finals(Job(out)).values()}
    assert len(weights) == 1, "all ranks end with the same"


@pytest.mark.parametrize(("split", "world"), size([("uneven", 3)], list(product(SPLITS, (1, 3)))))
def test_a_constant_world_stays_bitwise(tmp_path: Path, fixed: Any, split: str, world: int) -> None:
    out = tmp_path / "out"
    with Gang(tmp_path, Job(out), nodes=world, script=script(out, split, "--stop-at", "5")) as gang:
        for gen in (1, 2):
            assert [ended.code for ended in gang.run(gen)] == [0] * world, gang.log(0, gen)
    assert finals(Job(out)) == finals(Job(fixed(split, world)))
    assert curve(out) == curve(fixed(split, world))


def test_a_script_with_its_own_step_is_refused(tmp_path: Path) -> None:
    """Where the job file says that the size may change, and the script does not care."""
    out = tmp_path / "out"
    plain = (SCRIPT, str(out), "--plain")
    with Gang(tmp_path, Job(out), nodes=2, script=plain, env={"SPOTKEEPER_MAX_WORLD": "3"}) as gang:
        assert all(ended.code and ended.result is None for ended in gang.run(1))
        # The other may be waiting for it in its own backward.
        assert "Write run.backward(loss) for loss.backward()" in gang.log(0, 1)
        del gang.env["SPOTKEEPER_MAX_WORLD"]
        assert [ended.code for ended in gang.run(2)] == [0, 0], gang.log(0, 2)


def test_ranks_with_different_batches_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Gang(tmp_path, Job(out), nodes=2, script=script(out, "uneven"), before=_odd_one) as gang:
        assert all(ended.code for ended in gang.run(1))
        assert "attach(global_batch=): ranks give different values: 20, 21" in gang.log(0, 1)


def _odd_one() -> None:
    """Rank 1's script was changed."""
    if os.environ["RANK"] == "1":
        import spotkeeper.train.loop.attach as library

        attach = library.attach
        library.attach = lambda *things, global_batch: attach(*things, global_batch=global_batch + 1)


def test_sharded_or_bare_models_are_refused(tmp_path: Path) -> None:
    """Several ranks without DDP would each train on their own."""
    out = tmp_path / "out"
    with Gang(tmp_path, Job(out), nodes=2, script=(*script(out, "uneven"), "--bare")) as gang:
        assert all(ended.code for ended in gang.run(1))
        assert "wrap the model in DistributedDataParallel" in gang.log(1, 1)
    with Gang(tmp_path / "graph", Job(out), nodes=2, script=(*script(out, "uneven"), "--static-graph")) as gang:
        assert all(ended.code for ended in gang.run(1))
        assert "static_graph=True) cannot accumulate gradients" in gang.log(0, 1)


def test_uneven_splits_keep_the_loss_curve(tmp_path: Path, fixed: Any) -> None:
    """Speeds 1, 1 and 0.5: of seven micro-batches three, three and one."""
    out = tmp_path / "out"
    with Gang(tmp_path, Job(out), nodes=3, script=script(out, "uneven"), before=_mixed) as gang:
        assert [ended.code for ended in gang.run(1)] == [0] * 3, gang.log(0, 1)
        plans = [gang.log(node, 1).split("turns: ")[1].split()[0] for node in range(3)]
    assert plans == ["3", "3", "1"]
    assert apart(curve(fixed("uneven", 1)), curve(out)) <= 1e-6
    assert len({json.loads(final)["weights"] for final in finals(Job(out)).values()}) == 1


def _mixed() -> None:
    """What each machine needed in a generation before; and it says how many turns it got."""
    import spotkeeper.train.loop.run as library
    from spotkeeper.train.core import division

    rank, plan = int(os.environ["RANK"]), division.micro_batches
    library.remembered = lambda run: (0.01, 0.01, 0.02)[rank]

    def said(*args: Any) -> Any:
        turns = plan(*args)
        print(f"turns: {len(turns)}", flush=True)
        return turns

    division.micro_batches = said


def test_work_moves_while_training_when_speeds_change(tmp_path: Path) -> None:
    """Rank 1 is slow, then rank 0; a loader fetches ahead; a stop, and a generation that begins with what it knows."""
    steps, one, two = 24, tmp_path / "one", tmp_path / "two"
    common = (*SPLITS["uneven"], "--steps", f"{steps}")
    with Gang(tmp_path / "a", Job(one), nodes=1, script=(SCRIPT, f"{one}", *common)) as gang:
        assert [ended.code for ended in gang.run(1)] == [0], gang.log(0, 1)
    moving = (SCRIPT, f"{two}", *common, "--slow", "--workers", "1")
    with Gang(tmp_path / "b", Job(two), nodes=2, before=_short_windows) as gang:
        for gen, stop in ((1, 12), (2, 0)):
            gang.script = (*moving, "--stop-at", f"{stop}")
            assert [ended.code for ended in gang.run(gen)] == [0, 0], gang.log(0, gen)
            done = [[int(count) for count in re.findall(r"^work: (\d)$", gang.log(node, gen), re.M)] for node in (0, 1)]
            assert all(sum(pair) == 7 for pair in zip(*done, strict=True)), done
            assert min(done[0]) < 3 and min(done[1]) < 3, f"work went from rank 1 to rank 0, and back: {done}"
        assert "speeds have changed: from step" in gang.log(0, 1)
    difference = apart(curve(one, steps), curve(two, steps))
    print(f"{difference:.3g}")
    assert difference <= 1e-6
    assert len({json.loads(final)["weights"] for final in finals(Job(two)).values()}) == 1


def _short_windows() -> None:
    """Ranks exchange their times after each step."""
    from spotkeeper.train.loop import lag

    lag.WINDOW_S, lag.EVERY_S, lag._FIRST = 0.0, 0.0, 1
