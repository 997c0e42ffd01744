"""Checkpoints of sharded state: which machines write them, when they are valid, and which gangs can load them."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from spotkeeper.train.agent_link.control import Commit
from spotkeeper.train.checkpoint import sharded, store
from spotkeeper.train.checkpoint.durable import MemoryHandle
from spotkeeper.train.checkpoint.manifest import SAVE, FileSum, Manifest, RankPlace
from spotkeeper.train.checkpoint.protocol import Stretch
from spotkeeper.train.checkpoint.reshard import ShardRestorer, _Claim, _Part, _sources
from spotkeeper.train.checkpoint.sharded import Sharded, _CopiedSave, find_strategy
from spotkeeper.train.checkpoint.store import SkippedCheckpoint
from spotkeeper.train.core import pickling
from spotkeeper.train.core.errors import AttachError
from spotkeeper.train.core.pickling import StateTypeError
from spotkeeper.train.core.shards import METADATA
from tests.train.checkpoint.sharding import SAVED, Life, live, module
from tests.train.gangs import Event, Gang, Job, finals, run_to_end
from tests.train.jobs import _digest as digest

NEWEST = Commit(0, SAVED)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(folder, state) of two ranks on one machine."""
    return _made(tmp_path_factory.mktemp("one"), nodes=1)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(folder, state) of two machines with a rank each."""
    return _made(tmp_path_factory.mktemp("two"), nodes=2)


def _made(root: Path, nodes: int) -> tuple[Path, str]:
    told = live(Life(2, nodes, root / "ckpt", root / "out", train=True))
    assert [each.get("commit") for each in told] == [str(NEWEST), str(NEWEST) if nodes == 2 else "None"], told
    return root / "ckpt", told[0]["state"]


def taken_up(life: Life) -> list[dict[str, Any]]:
    told = live(life)
    assert not any("error" in each for each in told), told
    return told


def test_each_machine_has_its_parts_and_lists_all_files(two: tuple[Path, str]) -> None:
    for node, other in ((0, 1), (1, 0)):
        folder = two[0] / f"node{node}"
        manifest = store.read(folder, NEWEST)
        store.verify(folder, manifest)
        assert {file.name for file in manifest.files} == {f"__{node}_0.distcp", f"skeleton.{node}.pkl", METADATA}
        assert {file.name for file in manifest.others} == {f"__{other}_0.distcp", f"skeleton.{other}.pkl"}


def test_one_rank_restores_the_state_of_two(one: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(one[0], tmp_path / "ckpt")
    (told,) = taken_up(Life(1, 1, tmp_path / "ckpt", tmp_path / "out"))
    assert (told["step"], told["state"]) == (SAVED, one[1])
    assert "saved by 2 ranks, now 1: random generators are reseeded" in told["log"]


def test_peers_send_parts_to_machines_without_them(two: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(two[0] / "node0", tmp_path / "ckpt/node2")
    shutil.copytree(two[0] / "node1", tmp_path / "ckpt/node0")
    third = taken_up(Life(3, 3, tmp_path / "ckpt", tmp_path / "third"))
    assert [told["state"] for told in third] == [two[1]] * 3
    assert "(rank 0, 2; saved by 2 ranks, now 3: random generators are reseeded)" in third[1]["log"]
    shutil.copytree(two[0] / "node0", tmp_path / "swapped/node1")
    shutil.copytree(two[0] / "node1", tmp_path / "swapped/node0")
    swapped = taken_up(Life(2, 2, tmp_path / "swapped", tmp_path / "out"))
    assert [told["state"] for told in swapped] == [two[1]] * 2
    assert "resumed from 0-3 (rank 1)" in swapped[0]["log"]


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_save_of_shards_is_copied_while_they_train(nodes: int, tmp_path: Path) -> None:
    """Shards are copied only when the next step waits for them; no step of the optimizer gets into the checkpoint."""
    told = live(Life(2, nodes, tmp_path / "ckpt", tmp_path / "out", train=True, overlap=True))
    assert not any("error" in each for each in told), told
    commit = Commit(*map(int, told[0]["commit"].split("-")))
    assert commit.step >= 1 and all(each["copies"] for each in told)
    resumed = taken_up(Life(2, nodes, tmp_path / "ckpt", tmp_path / "again"))
    for each, then in zip(resumed, told, strict=True):
        assert (each["step"], each["state"]) == (commit.step, then["states"][str(commit.step)])


def test_a_kill_between_parts_and_commit_leaves_a_complete_checkpoint(two: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(two[0], tmp_path / "ckpt")
    for number, lacking in enumerate(((0, 1), (1,))):  # nobody was told to publish, or one of them
        for node in lacking:
            _uncommit(tmp_path / f"ckpt/node{node}")
        told = taken_up(Life(2, 2, tmp_path / "ckpt", tmp_path / f"out{number}"))
        assert [(each["state"], each["commit"]) for each in told] == [(two[1], str(NEWEST))] * 2
        for node in (0, 1):
            newest = store.newest(tmp_path / f"ckpt/node{node}").manifest
            assert newest is not None and newest.commit == NEWEST and len(newest.others) == 2


def _uncommit(folder: Path) -> None:
    """As it is when a saver has written its part and heard nothing more."""
    store.publish_part(folder / str(NEWEST), replace(store.read(folder, NEWEST), others=()))
    (folder / str(NEWEST) / store.COMMIT).unlink()
    assert store.newest(folder).commit != NEWEST


@pytest.mark.parametrize(
    ("claims", "world", "source", "lacking"),
    [
        ({0: _Claim(2, "a", [0], True), 1: _Claim(2, "a", [1], True)}, 2, (0, 1), []),
        ({0: _Claim(2, "a", [1], True), 1: _Claim(2, "a", [0], True)}, 2, (1, 0), []),
        ({0: _Claim(2, "a", [0, 1], True), 1: _Claim(2, "a", [0, 1], True)}, 2, (0, 1), []),
        ({at: _Claim(4, "a", [0, 1, 2, 3], True) for at in (0, 1)}, 2, (0, 1, 0, 1), []),
        ({2: _Claim(2, "a", [0, 1], False)}, 3, (2, 2), []),
        ({1: _Claim(3, "a", [1], True)}, 3, None, [0, 2]),
        ({0: _Claim(2, "a", [0], False), 1: _Claim(2, "b", [1], False)}, 2, None, [1]),
    ],
    ids=["own", "swapped", "one folder", "fewer", "blank peers", "missing", "parts of two saves"],
)
def test_the_reader_of_each_part(
    claims: dict[int, _Claim], world: int, source: tuple[int, ...] | None, lacking: list[int]
) -> None:
    found = _sources(claims, world)
    assert found[1] == lacking
    assert source is None or found[0] == source


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_rank_says_what_it_has_of_a_checkpoint(in_memory: bool) -> None:
    files = {"__0_0.distcp": lambda: memoryview(b"")} if in_memory else {}
    assert _Claim.of(_Part(PART, files)).words() == [2, "a", [0], False, in_memory]
    assert _Claim.of(_Part(replace(PART, others=THEIRS), files)).words() == [2, "a", [0], True, in_memory]


PART = Manifest(NEWEST, 2, (), (FileSum("__0_0.distcp", 8, "00"), FileSum(METADATA, 1, "11")), {SAVE: "a"}, 0.5)
THEIRS = (FileSum("__1_0.distcp", 9, "22"), FileSum("skeleton.1.pkl", 7, "33"))
OTHER = replace(PART, files=(*reversed(THEIRS), FileSum(METADATA, 1, "11")), saved_at=0.6)


class Writer:
    """A node's writer, which notes what it is asked for."""

    writes, commit = True, None

    def __init__(self, written: Manifest | None) -> None:
        self.written = written
        self.asked: list[tuple[object, ...]] = []

    def begin(self, commit: Commit) -> bool:
        return True

    def stage(self, size: int) -> tuple[MemoryHandle, memoryview]:
        return MemoryHandle(1, 2, size), memoryview(bytearray(size))

    def has(self, manifest: Manifest) -> None:
        self.asked.append(("has", manifest))

    def publish(self, manifest: Manifest) -> None:
        self.asked.append(("publish", manifest))

    def fail(self, commit: Commit, why: str) -> None:
        self.asked.append(("fail", commit, why))

    def discard(self, commit: Commit, why: str) -> None:
        self.asked.append(("discard", commit, why))


def rank_0(writer: Writer, gather: Callable[[bytes], list[bytes]]) -> Any:
    """The strategy on the first of two machines with a rank each."""
    places = tuple(RankPlace(rank, rank, rank, True) for rank in (0, 1))
    gang: Any = SimpleNamespace(rank=0, gather=gather)
    return Sharded(gang, cast(Any, writer), places, cast(Any, None), managed=True)


def published(mine: Manifest | None, theirs: Manifest | None) -> tuple[Writer, list[bytes]]:
    """What rank 0 of two asks its writer for, and tells the others."""
    writer, told = Writer(mine), []

    def gather(blob: bytes) -> list[bytes]:
        told.append(blob)
        return [blob, theirs.to_bytes() if theirs else b""]

    sharded = rank_0(writer, gather)
    sharded.publish()
    assert told == [], "no save is open"
    sharded._open = NEWEST
    sharded.publish()
    sharded.publish()
    return writer, told


@pytest.mark.parametrize("can", [False, True], ids=["known before", "seen when it stages"])
def test_without_the_other_machines_saver_a_save_fails_and_stays_closed(
    can: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gather(blob: bytes) -> list[bytes]:
        exchanged.append(blob)
        match len(exchanged):
            case 1:
                return [blob, pickling.dumps(replace(pickling.loads(blob, "rank 0"), can=can))]
            case 2:  # of chunks
                return [blob, blob]
            case _:
                return [blob, b""]

    exchanged: list[bytes] = []
    writer = Writer(None)
    sharded = rank_0(writer, gather)
    image = SimpleNamespace(stretches=(Stretch("state", 0, 5000), Stretch("skeleton", 8192, 300)))
    monkeypatch.setattr(sharded, "_image", lambda _: (image, list))
    sharded.save(None, NEWEST)
    assert writer.asked == [("fail", NEWEST, "rank 1's machine has no saver")]
    seen = len(exchanged)
    sharded.publish()
    assert len(exchanged) == seen, "no save is open"


@pytest.mark.parametrize("mine", [True, False], ids=["complete", "torn"])
@pytest.mark.parametrize("theirs", [0, 1], ids=["complete there", "torn there"])
@pytest.mark.parametrize("lands", [False, True], ids=["boundaries", "settle"])
def test_a_save_is_requested_once_the_copies_of_all_ranks_are_complete(mine: bool, theirs: int, lands: bool) -> None:
    """At two boundaries, or when something waits for the save."""

    def highest(value: int) -> Callable[[], int]:
        told.append(value)
        return lambda: max(value, theirs)

    told: list[int] = []
    writer = Writer(None)
    strategy = rank_0(writer, lambda blob: [blob])
    strategy._gang.highest = highest
    strategy._copied = _CopiedSave(NEWEST, lambda: writer.asked.append(("request",)), complete=mine)
    if lands:
        strategy._land()
    else:
        assert not strategy.advance() and strategy.copying and writer.asked == [] and told == [int(not mine)]
        strategy.advance()
    good = mine and not theirs
    assert writer.asked == [("request",) if good else ("discard", NEWEST, "its copy is torn on a machine")]
    assert told == [int(not mine)] and not strategy.copying and (strategy._open == NEWEST) is good


@pytest.mark.parametrize("good", [0, 1], ids=["sizes", "chunks"])
def test_what_a_rank_sends_is_not_run(good: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``good``: how many messages are as they should be."""
    left = iter([True] * good)
    sharded = rank_0(Writer(None), lambda blob: [blob, blob if next(left, False) else pickle.dumps(os.getcwd)])
    image = SimpleNamespace(stretches=(Stretch("state", 0, 5000), Stretch("skeleton", 8192, 300)))
    monkeypatch.setattr(sharded, "_image", lambda _: (image, list))
    with pytest.raises(StateTypeError, match=r"^a rank: cannot load \w+\.getcwd"):
        sharded.save(None, NEWEST)


def test_commit_is_requested_with_the_files_of_all_parts() -> None:
    writer, told = published(PART, OTHER)
    assert told == [PART.to_bytes()]
    assert writer.asked == [("publish", replace(PART, others=THEIRS))]


@pytest.mark.parametrize(
    "theirs",
    [
        None,
        replace(OTHER, versions={SAVE: "b"}),
        replace(OTHER, versions={}),
        replace(OTHER, commit=Commit(0, SAVED + 1)),
        replace(OTHER, files=OTHER.files[:1]),
    ],
    ids=["none", "another save", "an unnamed save", "another commit", "without tensors"],
)
def test_without_the_other_part_of_the_save_no_commit_is_requested(theirs: Manifest | None) -> None:
    writer, _ = published(PART, theirs)
    assert writer.asked == [("fail", NEWEST, "another machine has not written its part")]


def test_a_node_without_a_part_requests_nothing() -> None:
    assert [published(None, theirs)[0].asked for theirs in (OTHER, None)] == [[], []]
    _, told = published(None, OTHER)
    assert told == [b""]
    writer, told = published(replace(PART, commit=Commit(0, 1)), OTHER)
    assert told == [b""], "a part of another save"
    assert writer.asked == [("fail", NEWEST, "another machine has not written its part")]


def test_a_restored_complete_part_is_only_recorded() -> None:
    restored = replace(PART, others=THEIRS)
    writer, _ = published(restored, OTHER)
    assert (writer.asked, writer.written) == ([("has", restored)], None)


@pytest.mark.parametrize(("took_s", "left_s"), [(3.0, 2.0), (6.0, 0.0)])
def test_both_waits_of_a_settle_share_its_time(monkeypatch: pytest.MonkeyPatch, took_s: float, left_s: float) -> None:
    now, waits = [100.0], []

    def settle(timeout_s: float) -> None:
        waits.append(timeout_s)
        now[0] += took_s

    writer: Any = SimpleNamespace(writes=False, settle=settle, written=None)
    monkeypatch.setattr(sharded, "time", SimpleNamespace(monotonic=lambda: now[0]))
    gang: Any = SimpleNamespace(rank=0, world=1)
    Sharded(gang, writer, (RankPlace(0, 0, 0, True),), cast(Any, None), managed=True).settle(5.0)
    assert waits == [5.0, left_s]


def test_a_missing_part_is_an_error(two: tuple[Path, str], tmp_path: Path) -> None:
    (told,) = live(Life(1, 1, shutil.copytree(two[0] / "node0", tmp_path / "ckpt"), tmp_path / "out"))
    assert "checkpoint 0-3 was complete, but the part of rank 1 is on none of these machines" in told["error"]


def test_a_checkpoint_without_all_parts_is_passed_over(tmp_path: Path) -> None:
    store.publish_part(_folder_of(tmp_path, PART), PART)
    restorer = alone(tmp_path)
    assert restorer.restore() is None
    assert restorer.skipped == [SkippedCheckpoint("0-3", "the part of rank 1 is on none of these machines")]


def test_a_damaged_part_that_cannot_be_put_aside_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError("the disk is mounted read-only")

    store.publish_part(_folder_of(tmp_path, PART), PART)
    monkeypatch.setattr(store, "quarantine", refused)
    alone(tmp_path)._put_aside(NEWEST)


def _folder_of(root: Path, part: Manifest) -> Path:
    """A part's files, with sizes that are right."""
    folder = root / str(part.commit)
    folder.mkdir()
    for file in part.files:
        (folder / file.name).write_bytes(bytes(file.bytes))
    return folder


def alone(folder: Path) -> ShardRestorer:
    """The restorer of a gang of one rank, which an agent started."""
    gang: Any = SimpleNamespace(rank=0, world=1, gather=lambda blob: [blob])
    return ShardRestorer(gang, folder, cast(Any, None), keeps=True, managed=True)


def test_a_machines_image_and_a_neighbours_of_the_same_step_are_one_part(tmp_path: Path) -> None:
    restorer, (first, second) = alone(tmp_path), PART.files[:2]
    for file in (first, second):
        restorer._add(_Part(replace(PART, files=(file,)), {file.name: lambda: memoryview(b"")}))
    (whole,) = restorer._mine.values()
    assert {file.name for file in whole.manifest.files} == set(whole.files) == {first.name, second.name}


@pytest.mark.parametrize(
    ("mb_s", "nodes", "sends"), [(10.0, (0, 1), True), (0.0, (0, 1), False), (10.0, (0, 0), False)]
)
def test_machines_send_images_to_each_other_if_they_may(
    monkeypatch: pytest.MonkeyPatch, mb_s: float, nodes: tuple[int, int], sends: bool
) -> None:
    monkeypatch.setattr(sharded, "PeerImages", lambda *given: given)
    monkeypatch.setattr(sharded, "DistributedGang", lambda: "link")
    monkeypatch.setattr(sharded, "AllOptimizers", lambda parts: parts)
    places = tuple(RankPlace(rank, node, 0, True) for rank, node in enumerate(nodes))
    parts: Any = SimpleNamespace(sharded=True)
    settings: Any = SimpleNamespace(replicated=False, snapshots=True, peers_mb_s=mb_s, managed=True)
    gang, writer, pace = (cast(Any, SimpleNamespace(rank=0, world=2, writes=False)) for _ in range(3))
    made: Any = find_strategy(gang, writer, cast(Any, None), places, parts, settings, pace)
    copier = made._copier
    assert made._peers == ((gang, "link", writer, places, copier, pace, mb_s) if sends else None)


def test_a_sharded_model_needs_a_job_file_that_says_so() -> None:
    parts, settings = cast(Any, SimpleNamespace(sharded=True)), cast(Any, SimpleNamespace(replicated=True))
    nothing = cast(Any, None)
    with pytest.raises(AttachError) as refused:
        find_strategy(nothing, nothing, nothing, (), parts, settings, nothing)
    assert str(refused.value) == (
        "attach(model=): this model is sharded, so each machine has a part of the state, but the job file declares "
        "replicated state (the default): write `checkpoint: {replicated: false}` and submit it under another name"
    )


def test_a_damaged_part_makes_all_ranks_use_the_older_checkpoint(two: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(two[0], tmp_path / "ckpt")
    older = max(commit for commit in store.complete(tmp_path / "ckpt/node0") if commit < NEWEST)
    path = tmp_path / "ckpt/node1" / str(NEWEST) / "__1_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    told = taken_up(Life(2, 2, tmp_path / "ckpt", tmp_path / "out"))
    assert [each["step"] for each in told] == [older.step] * 2
    assert "skipped checkpoint 0-3: __1_0.distcp does not match its hash in COMMIT" in told[1]["log"]
    assert all(f"resumed from {older} (disk)" in each["log"] for each in told)
    for node in (0, 1):  # by its sizes it holds, so it would cost one that does its place
        folder = tmp_path / f"ckpt/node{node}"
        assert max(store.complete(folder)) == older
        assert store.damaged(folder, older) == [NEWEST], "put aside on both"


def test_torchs_own_tools_read_the_checkpoint(two: tuple[Path, str], tmp_path: Path) -> None:
    # They take 0.5 s to import, in every process that collects this file.
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint import load as dcp_load
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    for node in (0, 1):
        shutil.copytree(two[0] / f"node{node}" / str(NEWEST), tmp_path / "all", dirs_exist_ok=True)
    dcp_to_torch_save(tmp_path / "all", tmp_path / "all.pt")
    content = torch.load(tmp_path / "all.pt")
    names = [name for name, _ in module().named_parameters()]
    moments = [content["optimizer"]["state"][name] for name in names]
    state = [
        {name: content["model"][name] for name in names},
        {at: {key: each[key] for key in ("step", "exp_avg", "exp_avg_sq")} for at, each in enumerate(moments)},
    ]
    assert digest(state) == two[1]
    plain = module()
    into = {"model": dict(plain.named_parameters())}
    dcp_load(into, storage_reader=FileSystemReader(tmp_path / "all"), no_dist=True)
    assert digest([{name: param.detach() for name, param in plain.named_parameters()}]) == digest([state[0]])


def test_under_the_agent_a_killed_gang_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Two machines with their savers: the one rank is killed once a save is complete, in the middle of the run."""
    job = Job(tmp_path / "out", kind="fsdp", steps=15, events=(Event(3, 1, "save"), Event(6, 1, "kill")))
    with Gang(tmp_path / "gang", job, nodes=2, env={"SPOTKEEPER_REPLICATED": "0"}) as gang:
        assert gang.run(1)[1].code != 0
        assert [ended.code for ended in gang.run(2)] == [0, 0], gang.log(0, 2)
        begun = store.complete(gang.disk(0))
        assert begun == store.complete(gang.disk(1)) and begun[0] == Commit(2, job.steps)
        assert "resumed from 1-" in gang.log(1, 2)
    assert finals(job) == run_to_end(tmp_path / "alone", job, nodes=2)
