"""A slice of ``make crash``: every kind of process, slot, world and error once, at points drawn by a fixed seed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.train.crash import fiu, flips, handover, images, matrix, peers, plan, refusals, rivals
from tests.train.crash.gang import Cell, Outcome, Victim, crash
from tests.train.crash.plan import FAULTS, survey
from tests.train.crash.points import SHORT

SEED = 1
# (ranks, what is kept, who dies or whose disk fails, how)
SLICE = (
    (1, "first", "trainer", "kill"),
    (2, "middle", "trainer", "kill"),
    (2, "mirror", "saver", "kill"),
    (4, "last", "saver", "kill"),
    (1, "image", "saver", "kill"),
)


@pytest.fixture(scope="module")
def surveyed(tmp_path_factory: pytest.TempPathFactory) -> dict[Victim, list[str]]:
    """The points of one save, by which all are drawn."""
    return survey(tmp_path_factory.mktemp("survey") / "gang", 1, "last")


def _crash(root: Path, cell: Cell) -> Outcome:
    outcome = crash(root / "gang", cell)
    assert outcome.wrong == (), f"{cell} at {outcome.where!r}"
    return outcome


def test_a_save_has_fifty_points_in_each_process(surveyed: dict[Victim, list[str]]) -> None:
    assert {victim.what for victim in surveyed} == {"trainer", "saver"}
    assert all(len(names) >= plan.POINTS for names in surveyed.values())
    cells = list(plan.kills(1, "last", surveyed))
    assert len(cells) == len(set(cells)) == 2 * plan.POINTS


@pytest.mark.parametrize(("world", "slot", "what", "how"), SLICE)
def test_after_any_kill_the_newest_complete_checkpoint_loads(
    tmp_path: Path, surveyed: dict[Victim, list[str]], world: int, slot: str, what: str, how: str
) -> None:
    names = surveyed[Victim(what, 0)]
    point = random.Random(f"{SEED}{world}{slot}{what}").randrange(1, len(names) - 8)  # noqa: S311 - a draw
    outcome = _crash(tmp_path, Cell(world, slot, Victim(what, 0), point, how))
    assert outcome.where, "somebody died"


@pytest.fixture(scope="module")
def saved_image(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The trainer's points of a save that is an image."""
    return survey(tmp_path_factory.mktemp("saved") / "gang", 1, "image")[Victim("trainer", 0)]


@pytest.mark.parametrize(("call", "loaded"), [("break_seal, half", "older"), ("seal, half", "older"), ("ask", "new")])
def test_after_a_kill_in_a_save_that_is_an_image_its_seal_decides(
    tmp_path: Path, saved_image: list[str], call: str, loaded: str
) -> None:
    outcome = _crash(tmp_path, Cell(1, "image", Victim("trainer", 0), saved_image.index(call) + 1))
    assert (outcome.where, outcome.loaded) == (call, loaded)


def test_a_kill_between_commit_and_answer_is_survived(tmp_path: Path, surveyed: dict[Victim, list[str]]) -> None:
    point = surveyed[Victim("saver", 0)].index("answer") + 1
    assert _crash(tmp_path, Cell(1, "last", Victim("saver", 0), point)).loaded == "new"


@pytest.mark.parametrize("what", ["ENOSPC", "EIO+", SHORT])
def test_a_failing_disk_leaves_older_checkpoints_complete(
    tmp_path: Path, surveyed: dict[Victim, list[str]], what: str
) -> None:
    assert what in FAULTS
    victim = Victim("saver", 0)
    point = surveyed[victim].index("pwrite, half") + 1
    assert _crash(tmp_path, Cell(1, "last", victim, point, what)).where == "pwrite, half"


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("flips") / "whole"
    flips.prepare(root, 1)
    return root


@pytest.mark.parametrize("file", flips.FILES)
def test_a_flipped_byte_is_detected(tmp_path: Path, two_checkpoints: Path, file: str) -> None:
    flip = flips.Flip(1, file, "middle", everywhere=True)
    assert flips.try_flip(two_checkpoints, tmp_path / "flipped", flip) == []


def test_two_generations_at_once_leave_a_complete_checkpoint(tmp_path: Path, surveyed: dict[Victim, list[str]]) -> None:
    point = surveyed[Victim("saver", 0)].index("replace") + 1
    assert rivals.meet(tmp_path / "rivals", point) == []


def test_two_generations_and_one_saver(tmp_path: Path) -> None:
    assert rivals.one_saver(tmp_path / "rivals") == []


@pytest.mark.skipif(not fiu.installed(), reason=fiu.MISSING)
def test_an_error_of_any_system_call_is_survived(tmp_path: Path) -> None:
    for number, fault in enumerate(fiu.FAULTS):
        assert fiu.hurt(tmp_path / str(number), fault) == [], fault


@pytest.fixture(scope="module")
def imaged(tmp_path_factory: pytest.TempPathFactory) -> dict[Victim, list[str]]:
    """The points of images and of their writes, in a gang of two."""
    return images.survey(tmp_path_factory.mktemp("imaged") / "gang", 2)


# (who dies or whose disk fails, at which call, how)
IMAGES = (
    ("trainer", "break_seal, half", "kill"),
    ("trainer", "seal, half", "kill"),
    ("saver", "pwrite, half", "kill"),
    ("saver", "replace", "ENOSPC+"),
)


@pytest.mark.parametrize(("victim", "call", "how"), IMAGES)
def test_after_a_kill_at_an_image_one_step_is_loaded(
    tmp_path: Path, imaged: dict[Victim, list[str]], victim: str, call: str, how: str
) -> None:
    point = imaged[Victim(victim, 1)].index(call) + 1
    assert images.attack(tmp_path / "gang", images.Cell(2, Victim(victim, 1), point, how)) == []


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> dict[Victim, list[str]]:
    """The points of images of sharded state, in a gang of two machines."""
    return peers.survey(tmp_path_factory.mktemp("shared") / "gang", 2, 2)


@pytest.mark.parametrize(
    ("lost", "call"), [("machine", "break_seal, half"), ("machine", "seal, half"), ("saver", "send")]
)
def test_after_a_loss_at_an_image_of_sharded_state_one_step_is_loaded(
    tmp_path: Path, shared: dict[Victim, list[str]], lost: str, call: str
) -> None:
    points = [at for at, name in enumerate(shared[Victim("trainer", 1)], 1) if name == call]
    assert peers.attack(tmp_path / "gang", peers.Cell(2, 2, 1, points[-1], lost)) == []


@pytest.mark.parametrize(("victim", "point"), [("trainer", 4), ("saver", 9), ("agent", 0), ("agent", handover.WARM)])
def test_after_a_kill_at_a_hand_over_the_newest_state_of_any_machine_is_loaded(
    tmp_path: Path, victim: str, point: int
) -> None:
    cell = images.Cell(2, Victim(victim, 0 if victim == "agent" else 1), point)
    assert handover.attack(tmp_path / "gang", cell) == []


@pytest.fixture(scope="module")
def refusable(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The points of a run's first save, memory and all."""
    return refusals.survey(tmp_path_factory.mktemp("refusable"), "first")


# (ranks, whose call is refused, which, how, whether the cause goes)
REFUSALS = (
    (1, "saver", "posix_fallocate", refusals.FSIZE, False),  # staging memory, under `ulimit -f`
    (1, "saver", "posix_fallocate", refusals.FSIZE, True),
    (2, "saver", "posix_fallocate", refusals.MEMORY, True),
    (1, "saver", "pwrite", refusals.DISK, False),
    (2, "saver", "answer", "EMFILE+", True),  # the socket
    (1, "saver", "thread", refusals.THREAD, True),
    (2, "saver", "fsync", refusals.KILL, True),
    (1, "saver", "posix_fallocate", refusals.STOP, False),
    (2, "trainer", "mmap", "ENOMEM+", True),
    (1, "trainer", "ask", "EMFILE+", False),
)


@pytest.mark.parametrize(("world", "victim", "call", "what", "lifted"), REFUSALS)
def test_a_failed_save_stops_no_training(
    tmp_path: Path, refusable: dict[str, list[str]], world: int, victim: str, call: str, what: str, lifted: bool
) -> None:
    if why := refusals.missing(what):
        pytest.skip(why)
    point = refusable[victim].index(call) + 1
    cell = refusals.Cell(world, "first", Victim(victim, world - 1), point, what, lifted)
    assert refusals.refuse(tmp_path / "gang", cell) == []


def test_the_crash_test_records_its_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "OUT", tmp_path / "out" / "crash.json")
    row = matrix.Row("a row", tried=1, planned=2)
    row.found["loads older"] += 1
    row.wrong.append("it did not")
    matrix._write([row], {"1 rank": 60}, 0, 1.0)
    told = json.loads(matrix.OUT.read_text())
    assert (told["tried"], told["planned"], told["wrong"]) == (1, 2, 1)
    assert told["rows"][0]["found"] == {"loads older": 1}
