"""The exchange of the ranks' small parts: it runs beside training, and an image counts once all parts are in."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from spotkeeper.train.checkpoint.image import Image, RunState, thaw
from spotkeeper.train.core.small_parts import SmallParts


class Pair:
    """A gang of two ranks, as rank 0 uses it. ``other``: the part of rank 1."""

    rank, world, local_rank, node = 0, 2, 0, 0

    def __init__(self) -> None:
        self.other = b"b"
        self.calls: list[str] = []
        self.gone = False

    def gather(self, blob: bytes) -> list[bytes]:
        self.calls.append("gather")
        return [blob, self.other]

    def collect(self, blob: bytes) -> Callable[[], list[bytes]]:
        width = len(blob) - 8
        theirs = len(self.other).to_bytes(8, "little") + self.other[:width].ljust(width, b"\0")
        self.calls.append("collect")

        def answer() -> list[bytes]:
            self.calls.append("answer")
            if self.gone:
                raise RuntimeError("Connection closed by peer")
            return [blob, theirs]

        return answer


@pytest.fixture
def pair() -> Pair:
    return Pair()


@pytest.fixture
def small(pair: Pair) -> SmallParts:
    """After its first exchange, which learns the sizes."""
    small = SmallParts(pair)  # type: ignore[arg-type]
    assert small.exchange(b"aa", now=False).parts() == (b"aa", b"b") and pair.calls == ["gather"]
    pair.calls.clear()
    return small


def test_parts_are_waited_for_only_when_they_are_needed(pair: Pair, small: SmallParts) -> None:
    parts = small.exchange(b"aaa", now=False)
    assert pair.calls == ["collect"]
    assert parts.parts() == (b"aaa", b"b") and parts.parts() == (b"aaa", b"b")
    assert pair.calls == ["collect", "answer"], "once"


def test_a_save_that_training_waits_for_gathers_parts_of_any_size(pair: Pair, small: SmallParts) -> None:
    pair.other = bytes(100_000)
    assert small.exchange(b"a", now=True).parts() == (b"a", pair.other)
    assert small.exchange(b"a", now=False).parts() == (b"a", pair.other), "the next one has room for it"


def test_a_part_that_outgrows_its_room_fails_one_exchange(pair: Pair, small: SmallParts) -> None:
    pair.other = bytes(100_000)
    assert small.exchange(b"a", now=False).parts() is None
    assert small.exchange(b"a", now=False).parts() == (b"a", pair.other)


def test_the_room_shrinks_with_the_parts(pair: Pair, small: SmallParts) -> None:
    pair.other = bytes(100_000)
    small.exchange(b"a", now=True)
    pair.other = b""
    bounds = [small.exchange(b"a", now=False).bound for _ in range(2)]
    assert bounds[0] > 200_000 and bounds[1] < 20_000


def test_without_peers_nothing_is_exchanged(pair: Pair) -> None:
    pair.world, pair.other = 1, b""
    small = SmallParts(pair)  # type: ignore[arg-type]
    for part in (b"a", bytes(9999)):
        assert small.exchange(part, now=False).parts() == (part, b"")
    assert pair.calls == ["gather"] * 2


def test_memory_warmed_before_the_first_exchange_has_room_for_every_later_image(pair: Pair) -> None:
    """Else the first images after it would find a memory that is too small, and be left out."""
    pair.other = bytes(5_020)
    small = SmallParts(pair)  # type: ignore[arg-type]
    warmed = small.like(bytes(5_000))
    later = [small.exchange(bytes(size), now=False) for size in (5_000, 5_040, 5_000)]
    assert warmed.parts() == (bytes(5_000),) * 2
    assert [Image(RunState({}, None, (), None, each)).size for each in later] == [
        Image(RunState({}, None, (), None, warmed)).size
    ] * 3


@pytest.mark.parametrize("part", [b"", b"x" * 300, bytes(4096)], ids=len)
def test_an_image_has_room_for_the_parts_that_arrive(pair: Pair, small: SmallParts, part: bytes) -> None:
    image = Image(RunState({}, [1, 2], (), None, small.exchange(part, now=False)))
    memory = memoryview(bytearray(image.size))
    image.copy_to(memory)
    assert pair.calls == ["collect"], "the image is laid out and copied before the parts are in"
    assert image.finish(memory) == "" and image.size <= len(memory)
    state = thaw(memory, image.stretches)
    assert (state.local, state.rest) == ((part, b"b"), [1, 2])


def test_an_image_whose_parts_do_not_arrive_says_so(pair: Pair, small: SmallParts) -> None:
    outgrown = Image(RunState({}, None, (), None, small.exchange(bytes(100_000), now=False)))
    assert "has grown" in outgrown.finish(memoryview(bytearray(outgrown.size)))
    pair.gone = True
    lost = Image(RunState({}, None, (), None, small.exchange(b"a", now=False)))
    assert "Connection closed by peer" in lost.finish(memoryview(bytearray(lost.size)))
