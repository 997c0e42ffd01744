"""A trainer's image memories: what is asked of the saver, what its answers do, and which memory is filled next."""

from __future__ import annotations

import mmap
import os
from typing import Any

import pytest

from spotkeeper.train.agent_link.control import Fault
from spotkeeper.train.checkpoint.durable import PAGE, MemoryHandle
from spotkeeper.train.checkpoint.memories import ImageMemories, PartMemories
from spotkeeper.train.checkpoint.protocol import IMAGES, SaverError
from spotkeeper.train.checkpoint.seal import AREA

SIZE = PAGE + 1
SPARE = 1 << 20
ASKED = 2 * PAGE + SPARE + AREA  # whole pages, room to grow and the seal
LAST = IMAGES - 1


def file(size: int = ASKED) -> int:
    fd = os.memfd_create("image")
    os.truncate(fd, size)
    return fd


def closed(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return True
    return False


def given(number: int, size: int = ASKED) -> dict[str, Any]:
    return {"event": "image", "number": number, "bytes": size}


def refusal(number: int, fault: Fault) -> dict[str, Any]:
    return {"event": "image", "number": number, "bytes": 0, "fault": fault.value, "why": "said"}


@pytest.mark.parametrize(("kind", "op"), [(ImageMemories, "image"), (PartMemories, "part_image")])
def test_a_memory_is_requested_once_and_opened_when_it_is_there(
    kind: type[ImageMemories] | type[PartMemories], op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all of its pages: the copy of an image must not wait for the kernel."""
    asked: list[dict[str, Any]] = []
    mapped, map_file = list[int](), mmap.mmap
    monkeypatch.setattr(mmap, "mmap", lambda *given, flags: (mapped.append(flags), map_file(*given, flags=flags))[1])
    memories = kind(asked.append)
    assert memories.open(1, SIZE) is None and memories.open(1, SIZE) is None
    assert asked == [{"op": op, "number": 1, "bytes": ASKED}]
    fd = file()
    memories.note(given(1), [fd])
    memory = memories.open(1, SIZE)
    assert memory is not None and len(memory) == ASKED and mapped == [mmap.MAP_SHARED | mmap.MAP_POPULATE]
    most = 2 * PAGE + SPARE
    assert memories.open(1, most) is not None and memories.open(1, most + 1) is None, "then a larger one"
    assert asked[1:] == [{"op": op, "number": 1, "bytes": most + PAGE + SPARE + AREA}]


@pytest.mark.parametrize("kind", [ImageMemories, PartMemories])
def test_without_a_descriptor_or_a_mapping_no_image_is_made(
    kind: type[ImageMemories] | type[PartMemories], monkeypatch: pytest.MonkeyPatch
) -> None:
    none_left, no_room = kind(lambda _: None), kind(lambda _: None)
    none_left.note(given(0), [])
    fd = file()
    monkeypatch.setattr(mmap, "mmap", _no_memory)
    no_room.note(given(0), [fd])
    whys = ("this process has no file descriptor left", "[Errno 12] Cannot allocate memory")
    for memories, why in zip((none_left, no_room), whys, strict=True):
        with pytest.raises(SaverError) as refused:
            memories.open(0, SIZE)
        assert (refused.value.fault, str(refused.value)) == (Fault.NO_MEMORY, f"image memory: {why}")
    assert closed(fd)


def _no_memory(*_: object, **__: object) -> None:
    raise OSError(12, "Cannot allocate memory")


@pytest.mark.parametrize(
    ("number", "fault", "limits"),
    [(LAST, Fault.NO_MEMORY, True), (0, Fault.NO_MEMORY, False), (LAST, Fault.FENCED, False)],
)
def test_only_without_memory_for_the_last_one_images_go_on_with_two(number: int, fault: Fault, limits: bool) -> None:
    asked: list[dict[str, Any]] = []
    memories = ImageMemories(asked.append)
    memories.note(given(1), [file()])
    memories.newest = memories.writing = 1
    memories.note(refusal(number, fault), [])
    told = memories.limited if limits else memories.refused
    assert told is not None and (told.fault, str(told)) == (fault, "said")
    assert (memories.refused is None, memories.newest, memories.writing) == (
        (True, 1, 1) if limits else (False,) + (None,) * 2
    )
    if limits:
        assert memories.open(LAST, SIZE) is None and asked == [], "it is not requested again"
        assert memories.open(0, SIZE) is None and len(asked) == 1


def test_an_answer_for_one_memory_leaves_the_others_awaited() -> None:
    memories = ImageMemories(lambda _: None)
    memories.open(0, SIZE)
    memories.open(1, SIZE)
    memories.note(given(0), [file()])
    assert (memories.awaits(0), memories.awaits(1)) == (False, True)


@pytest.mark.parametrize(
    ("there", "newest", "writing", "limited", "following"),
    [
        ((), None, None, False, 0),
        ((0,), None, None, False, 0),  # one that exists comes first
        ((1,), None, None, False, 1),
        ((0, 1, 2), 0, None, False, 1),
        ((0, 1, 2), 0, 1, False, 2),
        ((0, 1), 0, 1, True, None),
        ((0, 1), 1, None, True, 0),
        ((0, 1), 1, 1, True, 0),
    ],
)
def test_which_memory_the_next_image_fills(
    there: tuple[int, ...], newest: int | None, writing: int | None, limited: bool, following: int | None
) -> None:
    memories = ImageMemories(lambda _: None)
    for number in there:
        memories.note(given(number), [file()])
    if limited:
        memories.note(refusal(LAST, Fault.NO_MEMORY), [])
    memories.newest, memories.writing = newest, writing
    assert memories.next() == following


def test_other_processes_open_a_part_by_its_handle_until_it_is_dropped() -> None:
    memories = PartMemories(lambda _: None)
    assert memories.handle(0) is None
    fd = file()
    memories.note(given(0), [fd])
    assert memories.handle(0) == MemoryHandle(os.getpid(), fd, ASKED)
    second = file()
    memories.note(given(0), [second])
    assert memories.handle(0) == MemoryHandle(os.getpid(), second, ASKED)
    memories.note({"event": "image", "number": 1, "fault": Fault.NO_MEMORY.value, "why": "said"}, [])
    assert memories.handle(0) is None and closed(second)
    with pytest.raises(SaverError, match="said"):
        memories.open(0, SIZE)
