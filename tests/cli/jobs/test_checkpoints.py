"""``checkpoints``: what there is and where, and a copy of the bucket's on this machine: whole, or why not."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

import msgspec
import pytest

from spotkeeper.cli.jobs import download as fetching
from spotkeeper.client.errors import Exit
from spotkeeper.contract.facts import Fact, Kind
from spotkeeper.contract.generation import Progress
from spotkeeper.contract.record import Mirrored, Node, Phase
from spotkeeper.contract.uploads import MirrorFile, MirrorList, list_name, part_names, part_size
from spotkeeper.reconcile.store.store import Store
from spotkeeper.train.agent_link.control import Commit
from spotkeeper.train.checkpoint import store as disk
from spotkeeper.train.checkpoint.manifest import FileSum, Manifest, RankPlace
from tests.cli.conftest import Cli
from tests.cli.records import JOB, a_job, slot

FILES = {"state.bin": bytes(range(256)) * 10, "skeleton.pkl": b"x" * 100, "empty": b""}
PART = 1000


def copy(store: Store, commit: str, node: int = 0, whole: tuple[int, ...] = (0,), names: tuple[str, ...] = ()) -> None:
    """As an agent leaves it."""
    files = dict(zip(names or FILES, FILES.values(), strict=True))
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    parsed = Commit.parse(commit)
    assert parsed is not None
    gang = tuple(RankPlace(number, number, slot, True) for number, slot in enumerate(whole))
    listed = tuple(FileSum(name, len(data), sums[name]) for name, data in files.items())
    proof = Manifest(parsed, len(whole), gang, listed, {}, time.time() - 90).to_bytes().decode()
    known = tuple(MirrorFile(name, len(data), sums[name]) for name, data in files.items())
    content = MirrorList(parsed.gen, parsed.step, node, whole, known, proof, time.time() - 90, PART)
    for file in known:
        for number, name in enumerate(part_names(JOB, commit, node, file, PART)):
            if ".." not in name:
                start = number * PART
                store.put(name, files[file.name][start : start + part_size(file, number, PART)])
    store.put(list_name(JOB, commit, node), msgspec.json.encode(content))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(fetching, "PART", 300)  # bytes: a part takes several requests
    home = tmp_path / "here"
    home.mkdir()
    monkeypatch.chdir(home)
    return home


def test_a_checkpoint_that_later_generations_only_resumed_from_is_listed(cli: Cli, store: Store) -> None:
    """A script that fails soon after each resume commits nothing new."""
    a_job(store, nodes=(Node(cur=slot(), wrote=8, newest_generation=8), Node(cur=slot(attempt=2), wrote=1)))
    store.put_progress(JOB, Progress(8, 399, 1.0, commit_gen=2, commit_step=399))
    rows = json.loads(cli("checkpoints", "first", "--json").out)
    assert [(row["commit"], row["where"]) for row in rows] == [("2-399", "disk of node 0")]


def test_checkpoints_are_listed_newest_first_with_their_places(cli: Cli, store: Store) -> None:
    nodes = (Node(cur=slot(), wrote=2), Node(cur=slot(attempt=2), wrote=1, machine="sk-prod-fix-s0"))
    a_job(store, nodes=nodes, mirror=(Mirrored("1-20", 0, 0.0),), mirror_top="1-20")
    store.put_progress(JOB, Progress(2, 45, 1.0, commit_gen=2, commit_step=40))
    store.put_fact(JOB, Fact("u", "b", 1, 2, 1, Kind.CHECKPOINT, "1-30"))
    copy(store, "1-20")
    copy(store, "1-10")
    store.put(f"jobs/{JOB}/ckpt/2-40/0/state.bin", b"x")
    rows = json.loads(cli("checkpoints", "first", "--json").out)
    assert [(row["commit"], row["where"], row.get("complete", True)) for row in rows] == [
        ("2-40", "disk of node 0", True),
        ("2-40", "the bucket", False),
        ("1-30", "static machine sk-prod-fix-s0", True),
        ("1-20", "the bucket", True),
        ("1-10", "the bucket", True),
    ]
    lines = cli("checkpoints", "first").out.splitlines()
    assert lines[1].split("  ")[-1].strip() == "incomplete: its upload is running or was never finished"
    assert "2.7 kB" in lines[3] and " old" in lines[3]
    assert lines[4].endswith("not usable")


def test_missing_parts_are_named(cli: Cli, store: Store) -> None:
    a_job(store)
    copy(store, "1-20", 0, (0, 1, 2))
    copy(store, "1-20", 2, (0, 1, 2))
    (row,) = json.loads(cli("checkpoints", JOB, "--json").out)
    assert (row["complete"], row["note"]) == (False, "parts missing: nodes 1")


def test_a_job_without_checkpoints_is_reported(cli: Cli, store: Store) -> None:
    a_job(store)
    done = cli("checkpoints", "first")
    assert done.code == 0 and "no machine has reported a checkpoint" in done.out
    done = cli("checkpoints", "first", "--fetch", "ckpt")
    assert done.code == Exit.MISSING and "mirror: {every_min: 60}" in done.err


def test_deleted_disks_list_no_checkpoints(cli: Cli, store: Store) -> None:
    nodes = (Node(wrote=2),)
    a_job(store, nodes=nodes, phase=Phase.DONE)
    store.put_progress(JOB, Progress(2, 45, 1.0, commit_gen=2, commit_step=40))
    assert json.loads(cli("checkpoints", JOB, "--json").out) == []
    assert "it has ended and its disks are deleted" in cli("checkpoints", JOB).out
    copy(store, "1-20")
    assert [row["where"] for row in json.loads(cli("checkpoints", JOB, "--json").out)] == ["the bucket"]


def test_the_newest_complete_copy_is_fetched_and_loadable(cli: Cli, store: Store, here: Path) -> None:
    a_job(store)
    copy(store, "1-20")
    copy(store, "2-10")
    store.put(f"jobs/{JOB}/ckpt/3-1/0/state.bin", b"x")
    done = cli("checkpoints", "first", "--fetch", "ckpt")
    assert done.code == 0 and done.out.startswith("2-10 is in ckpt, 4 files; ")
    assert disk.newest(here / "ckpt").commit == Commit(2, 10)
    (here / "ckpt/2-10/state.bin").write_bytes(b"")
    assert (
        json.loads(cli("checkpoints", "first", "--fetch", "ckpt", "--commit", "2-10", "--json").out)["commit"] == "2-10"
    )
    assert disk.newest(here / "ckpt").skipped == ()
    assert cli("checkpoints", "first", "--fetch", "ckpt", "--commit", "1-20").code == 0
    assert disk.complete(here / "ckpt") == [Commit(2, 10), Commit(1, 20)]


def test_sharded_state_has_a_folder_per_node(cli: Cli, store: Store, here: Path) -> None:
    a_job(store)
    for node in (0, 1):
        copy(store, "1-20", node, (0, 1))
    assert cli("checkpoints", "first", "--fetch", "ckpt").code == 0
    assert [disk.newest(here / "ckpt" / str(node)).commit for node in (0, 1)] == [Commit(1, 20)] * 2


@pytest.mark.parametrize("data", [b"", b"torn", b"\0" * 560])
def test_a_damaged_copy_is_refused(cli: Cli, store: Store, here: Path, data: bytes) -> None:
    a_job(store)
    copy(store, "1-20")
    store.put(f"jobs/{JOB}/ckpt/1-20/0/state.bin.part-00002", data)
    done = cli("checkpoints", "first", "--fetch", "ckpt")
    assert done.code == Exit.FAILED and "state.bin is damaged in the bucket" in done.err
    assert list((here / "ckpt/1-20").iterdir()) == []


def test_no_more_of_a_list_is_read_than_an_agent_writes(
    cli: Cli, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_job(store)
    copy(store, "1-20")
    monkeypatch.setattr("spotkeeper.cli.jobs.checkpoints.LIST_BYTES", 40)
    assert "never finished" in cli("checkpoints", "first").out


def test_no_file_name_leaves_the_folder(cli: Cli, store: Store, here: Path) -> None:
    a_job(store)
    copy(store, "1-20", names=("../../evil", "b", "c"))
    done = cli("checkpoints", "first", "--fetch", "ckpt")
    assert done.code == Exit.REFUSED and "would be outside" in done.err
    assert not (here / "evil").exists() and not (here / "ckpt").exists()


def test_a_missing_checkpoint_error_lists_the_others(cli: Cli, store: Store) -> None:
    a_job(store)
    copy(store, "1-20")
    done = cli("checkpoints", "first", "--fetch", "ckpt", "--commit", "1-21")
    assert done.code == Exit.MISSING and "one of 1-20" in done.err
    assert cli("checkpoints", "first", "--commit", "1-20").code == Exit.USAGE
