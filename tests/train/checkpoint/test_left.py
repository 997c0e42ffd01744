"""Parts of sharded state that a hanging trainer has left: it is still connected, and may go on at any time."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotkeeper.train.agent_link.control import Commit
from spotkeeper.train.checkpoint import durable
from spotkeeper.train.checkpoint.client import Client, new_manifest
from spotkeeper.train.checkpoint.durable import PAGE
from spotkeeper.train.checkpoint.manifest import SAVE
from spotkeeper.train.checkpoint.protocol import LEFT_PARTS, SaverError, Stretch
from spotkeeper.train.checkpoint.reshard import KeptImage
from spotkeeper.train.checkpoint.seal import break_seal, seal
from tests.train.checkpoint.test_handover import Node
from tests.train.checkpoint.test_saver import GANG

NAME = "__0_0.distcp"
FILES = (Stretch(NAME, 0, 9), Stretch("skeleton.0.pkl", PAGE, 5))


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path / "ckpt", monkeypatch)


def opened(node: Node, client: Client, number: int, size: int = 2 * PAGE) -> memoryview:
    while (memory := client.part_image(number, size)) is None:
        node.server._drain(node.server._peers[-1])
    return memory


def keep(node: Node, client: Client, number: int, step: int) -> memoryview:
    """Keep an image of this machine's part, whose bytes are its step."""
    memory = opened(node, client, number)
    break_seal(memory)
    memory[:9] = bytes([step]) * 9
    assert seal(memory, new_manifest(Commit(1, step), GANG, {SAVE: f"of {step}"}), FILES, part=True)
    return memory


def kept(node: Node, client: Client) -> dict[int, KeptImage]:
    """What the saver offers, by number."""
    found = {}
    for number in range(2 * LEFT_PARTS):
        client.parts.request(number, 0)
        node.server._drain(node.server._peers[-1])
        client._read_all()
        handle = client.parts.handle(number)
        if handle is not None and (image := KeptImage.open(number, handle)):
            found[number] = image
    return found


def steps(node: Node, client: Client) -> dict[int, int]:
    return {number: image.files[NAME]()[0] for number, image in kept(node, client).items()}


def test_a_part_stays_while_its_trainer_is_connected(node: Node) -> None:
    older, _ = node.hello(1)
    keep(node, older, 0, 5)
    keep(node, older, 2, 4)
    break_seal(opened(node, older, 1))
    client, _ = node.hello(2)
    assert steps(node, client) == {LEFT_PARTS: 5, LEFT_PARTS + 2: 4}


def test_a_part_is_in_its_place_once_its_trainer_is_gone(node: Node) -> None:
    older, _ = node.hello(1)
    keep(node, older, 0, 5)
    node.lose()
    client, _ = node.hello(2)
    assert steps(node, client) == {0: 5}


def test_the_next_trainer_gets_memory_that_no_other_maps(node: Node) -> None:
    older, _ = node.hello(1)
    theirs = keep(node, older, 0, 5)
    client, _ = node.hello(2)
    mine = keep(node, client, 0, 7)
    theirs[:] = bytes(len(theirs))
    assert bytes(mine[:9]) == bytes([7]) * 9 and steps(node, client) == {0: 7}


def test_a_part_that_changes_while_it_is_read_is_not_trusted(node: Node) -> None:
    older, _ = node.hello(1)
    memory = keep(node, older, 0, 5)
    client, _ = node.hello(2)
    image = kept(node, client)[LEFT_PARTS]
    read = image.files[NAME]()
    memory[:9] = bytes(9)
    assert bytes(read) == bytes([5]) * 9, "a copy"
    break_seal(memory)
    with pytest.raises(ValueError, match="it changed while it was read"):
        image.files[NAME]()


def test_a_trainer_with_no_sealed_part_leaves_what_the_one_before_it_left(node: Node) -> None:
    keep(node, node.hello(1)[0], 0, 5)
    middle, _ = node.hello(2)
    opened(node, middle, 0)
    client, _ = node.hello(3)
    assert steps(node, client) == {LEFT_PARTS: 5}
    keep(node, client, 1, 7)
    last, _ = node.hello(4)
    assert steps(node, last) == {LEFT_PARTS + 1: 7}, "one set at a time"


def test_what_is_left_is_freed_once_a_checkpoint_is_whole_on_disk(node: Node) -> None:
    keep(node, node.hello(1)[0], 0, 5)
    client, _ = node.hello(2)
    client.reserve(2 * PAGE)
    node.server._drain(node.server._peers[-1])
    client.stage(2 * PAGE)
    manifest = new_manifest(Commit(2, 6), GANG, {SAVE: "of 6"})
    client.save(manifest, FILES, part=True)
    node.server._drain(node.server._peers[-1])
    event = client.wait(10)
    assert steps(node, client) == {LEFT_PARTS: 5}
    client.publish(event.manifest)  # type: ignore[union-attr]
    node.server._drain(node.server._peers[-1])
    client.wait(10)
    client.parts.drop_left()
    assert steps(node, client) == {}


def test_what_is_left_gives_way_to_new_images(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(node, node.hello(1)[0], 0, 5)
    client, _ = node.hello(2)
    left = node.server._memories._left
    monkeypatch.setattr(durable, "memory_refusal", lambda *_: "only 3 MB are left" if left else "")
    opened(node, client, 0)
    assert steps(node, client) == {}


def test_parts_of_another_folder_are_dropped(node: Node, tmp_path: Path) -> None:
    keep(node, node.hello(1)[0], 0, 5)
    node.folder = tmp_path / "other"
    client, _ = node.hello(2)
    assert steps(node, client) == {}


def test_what_is_left_is_only_read(node: Node) -> None:
    client, _ = node.hello(1)
    client.parts.request(LEFT_PARTS, PAGE)
    node.server._drain(node.server._peers[-1])
    with pytest.raises(SaverError, match="the saver ended"):
        client._read_all()
