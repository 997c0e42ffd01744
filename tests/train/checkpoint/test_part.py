"""A node's part of a checkpoint of sharded state: durable first, COMMIT when all are; and what is left of either."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from spotkeeper.train.agent_link.control import Commit
from spotkeeper.train.checkpoint import store
from spotkeeper.train.checkpoint.client import Client, new_manifest
from spotkeeper.train.checkpoint.manifest import FileSum
from spotkeeper.train.checkpoint.protocol import PartWritten, SaveDurable, SaveFailed, Stretch

THEIRS = (FileSum("__1_0.distcp", 10, "00" * 32),)
STRETCHES = (Stretch("__0_0.distcp", 0, 5000), Stretch("skeleton.0.pkl", 8192, 300))


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    client = Client.private()
    client.hello(tmp_path, 1, 2)
    yield client
    client.close()


def write(client: Client, commit: Commit, byte: bytes = b"x") -> PartWritten:
    memory = client.stage(3 * 4096)
    memory[: 3 * 4096] = byte * (3 * 4096)
    client.save(new_manifest(commit, (), {}), STRETCHES, part=True)
    written = client.wait(20)
    assert isinstance(written, PartWritten)
    return written


def publish(client: Client, written: PartWritten) -> None:
    client.publish(replace(written.manifest, others=THEIRS))
    assert isinstance(client.wait(20), SaveDurable)


def test_a_part_is_no_checkpoint_until_all_parts_are_known(client: Client, tmp_path: Path) -> None:
    written = write(client, Commit(1, 5))
    assert (store.complete(tmp_path), store.partial(tmp_path)) == ([], [Commit(1, 5)])
    newest = store.newest(tmp_path)
    assert newest.commit is None and "this node's part is complete" in newest.skipped[0].why
    publish(client, written)
    assert (store.complete(tmp_path), store.partial(tmp_path)) == ([Commit(1, 5)], [])
    manifest = store.newest(tmp_path).manifest
    assert manifest is not None and manifest.others == THEIRS
    assert [file.name for file in manifest.files] == ["__0_0.distcp", "skeleton.0.pkl"]
    assert not (tmp_path / "1-5" / store.PART).exists()


def test_a_part_outlives_the_end_of_its_generation(client: Client, tmp_path: Path) -> None:
    write(client, Commit(1, 5))
    hello = client.hello(tmp_path, 2, 2)
    assert hello.quarantined == () and store.partial(tmp_path) == [Commit(1, 5)]
    assert hello.staged is not None and hello.staged.commit == Commit(1, 5)
    client.publish(replace(store.read_part(tmp_path, Commit(1, 5)), others=THEIRS))
    assert isinstance(client.wait(20), SaveDurable), "the next generation may still complete it"


def test_a_damaged_part_is_quarantined(client: Client, tmp_path: Path) -> None:
    write(client, Commit(1, 5))
    (tmp_path / "1-5" / "__0_0.distcp").write_bytes(b"short")
    (moved,) = client.hello(tmp_path, 2, 2).quarantined
    assert "__0_0.distcp has 5 bytes, but PART says 5000" in moved.why
    client.publish(new_manifest(Commit(1, 5), (), {}))
    failed = client.wait(20)
    assert isinstance(failed, SaveFailed) and "was not finished" in failed.why


def test_commit_lists_only_written_files(client: Client, tmp_path: Path) -> None:
    written = write(client, Commit(1, 5))
    client.publish(replace(written.manifest, files=THEIRS))
    failed = client.wait(20)
    assert isinstance(failed, SaveFailed) and "lists other files than the written part" in failed.why
    assert store.complete(tmp_path) == []


def test_of_parts_without_commit_only_the_newest_is_kept(client: Client, tmp_path: Path) -> None:
    publish(client, write(client, Commit(1, 1)))
    write(client, Commit(1, 2))
    write(client, Commit(1, 3))
    client.hello(tmp_path, 1, 2)  # answered after what went before: pruning
    assert (store.complete(tmp_path), store.partial(tmp_path)) == ([Commit(1, 1)], [Commit(1, 3)])
    publish(client, write(client, Commit(1, 4)))
    client.hello(tmp_path, 1, 2)
    assert (store.complete(tmp_path), store.partial(tmp_path)) == ([Commit(1, 4), Commit(1, 1)], [])
    publish(client, write(client, Commit(1, 5)))
    client.hello(tmp_path, 1, 2)
    assert store.scan(tmp_path) == [Commit(1, 5), Commit(1, 4)]
