"""All ranks do the same after the same step, whatever each of them sees."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from spotkeeper.train.agent_link.control import Control
from spotkeeper.train.core.pace import SavePace
from spotkeeper.train.loop.boundary import EVERY_S, Agreement, Boundary, StepAction


class Link:
    """The all-reduce of some threads: the highest of the values each gave at its n-th call."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.rounds = 0
        self._values: list[list[int]] = []
        self._counts = [0] * world
        self._changed = threading.Condition()

    def end(self, rank: int) -> Rank:
        return Rank(self, rank)

    def give(self, rank: int, value: int) -> Callable[[], int]:
        with self._changed:
            number = self._counts[rank]
            self._counts[rank] += 1
            if number == len(self._values):
                self._values.append([])
            self._values[number].append(value)
            self.rounds = len(self._values)
            self._changed.notify_all()

        def answer() -> int:
            with self._changed:
                assert self._changed.wait_for(lambda: len(self._values[number]) == self.world, 10)
                return max(self._values[number])

        return answer


class Rank:
    """Of ``gang.Gang``, what an agreement uses."""

    def __init__(self, link: Link, rank: int) -> None:
        self.world, self.rank, self._link = link.world, rank, link
        self.local_rank = self.node = 0

    def highest(self, value: int) -> Callable[[], int]:
        return self._link.give(self.rank, value)


def play(
    views: list[Callable[[int], StepAction]], steps: int, step_s: float = 1.0
) -> tuple[list[list[StepAction]], Link]:
    """Each rank's answers, step by step; ``views[rank](step)`` is what it sees."""
    link = Link(len(views))
    answers: list[list[StepAction]] = [[] for _ in views]

    def rank(number: int) -> None:
        agreement = Agreement(link.end(number))  # type: ignore[arg-type]
        for step in range(steps):
            answers[number].append(agreement.after_step(lambda step=step: views[number](step), step_s))
            if answers[number][-1] is StepAction.STOP:
                return
        agreement.drain()

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(len(views))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "a rank waits for another for ever"
    return answers, link


def nothing(_: int) -> StepAction:
    return StepAction.NOTHING


@pytest.mark.parametrize("who", [0, 1, 2])
def test_one_ranks_view_becomes_all_ranks_action(who: int) -> None:
    views = [nothing] * 3
    views[who] = lambda step: StepAction.SAVE if step == 3 else StepAction.NOTHING
    answers, _ = play(views, 8)
    assert answers[0] == answers[1] == answers[2]
    assert [step for step, call in enumerate(answers[0]) if call is StepAction.SAVE] == [4], "after the next step"


def test_a_busy_saver_on_any_rank_delays_a_save() -> None:
    answers, _ = play([lambda _: StepAction.SAVE, lambda step: StepAction.BUSY if step < 5 else StepAction.NOTHING], 10)
    assert answers[0] == answers[1]
    assert answers[0].index(StepAction.SAVE) == 6


def test_a_save_that_begins_causes_no_second_one() -> None:
    """Within the step that is answered with SAVE the old wish still stands; the saver is busy only after it."""
    answers, _ = play([lambda step: StepAction.SAVE if step <= 1 else StepAction.BUSY] * 2, 6)
    assert [step for step, call in enumerate(answers[0]) if call is StepAction.SAVE] == [1]


def test_a_stop_overrides_all_other_actions() -> None:
    answers, link = play(
        [lambda _: StepAction.BUSY, lambda step: StepAction.STOP if step == 2 else StepAction.SAVE], 10
    )
    assert answers[0] == answers[1]
    assert answers[0][-1] is StepAction.STOP and len(answers[0]) == 4
    assert link.rounds == 3, "nothing is left under way"


def test_fast_steps_agree_less_often() -> None:
    step_s = 0.01
    answers, link = play([nothing, lambda step: StepAction.STOP if step >= 50 else StepAction.NOTHING], 200, step_s)
    assert answers[0] == answers[1]
    often = int(EVERY_S / step_s)
    assert len(answers[0]) <= 50 + often + 2, "heard within the time"
    assert link.rounds <= len(answers[0]) / often + 3


def test_a_single_rank_needs_no_exchange() -> None:
    answers, link = play([lambda step: StepAction.SAVE if step == 1 else StepAction.NOTHING], 3)
    assert answers == [[StepAction.NOTHING, StepAction.SAVE, StepAction.NOTHING]] and link.rounds == 0


@pytest.mark.parametrize(
    ("busy", "images", "free", "due", "view"),
    [
        (True, True, None, True, StepAction.FULL),
        (True, True, None, False, StepAction.FULL),
        (True, True, 2, True, StepAction.BUSY_IMAGE),
        (True, True, 2, False, StepAction.BUSY),
        (True, False, None, True, StepAction.BUSY),
        (False, True, 2, True, StepAction.IMAGE),
        (False, True, None, True, StepAction.NOTHING),
    ],
)
@pytest.mark.parametrize("copies", [False, True], ids=["saver writes", "save is copied"])
def test_a_rank_without_memory_for_an_image_wants_none(
    busy: bool, images: bool, free: int | None, due: bool, view: StepAction, copies: bool
) -> None:
    """While a saver writes and the rank has no third memory, it also keeps the other ranks from an image.

    A save that has not reached the savers yet is as one that they write: no other save may begin.
    """
    boundary = Boundary.__new__(Boundary)
    boundary._control, boundary._pace = Control.private(), SavePace(60.0, fixed_s=1e9)
    boundary._pace.plain, boundary._pace.image_since = due, -1e9
    boundary.writer = SimpleNamespace(busy=busy and not copies, writes=True)  # type: ignore[assignment]
    strategy = SimpleNamespace(copying=busy and copies, images=images, next_image=lambda: free, ready=lambda: False)
    boundary._strategy = strategy  # type: ignore[assignment]
    assert boundary._view() is view


@pytest.mark.parametrize(("free", "waits"), [(None, False), (2, True)], ids=["no memory yet", "others cannot"])
def test_an_image_that_is_left_out_counts_in_no_spacing(free: int | None, waits: bool) -> None:
    """The next try comes once this rank has memory, or after an interval if another rank is the reason."""
    boundary = Boundary.__new__(Boundary)
    boundary._pace, boundary._info = SavePace(60.0), SimpleNamespace(gen=1)  # type: ignore[assignment]
    boundary._position = SimpleNamespace(step=7)  # type: ignore[assignment]
    boundary._strategy = SimpleNamespace(image=lambda *_: False, next_image=lambda: free)  # type: ignore[assignment]
    boundary._pace.add_image(1.0, 1.1, 3)
    boundary._pace.plain = True
    boundary._keep_image()
    assert (boundary._pace.image_step, boundary._pace.image_spacing) == (3, 0)
    assert boundary._pace.image_due(time.monotonic()) is not waits


def test_a_rank_without_memory_prevents_the_images_of_all() -> None:
    answers, _ = play(
        [lambda _: StepAction.IMAGE, lambda step: StepAction.FULL if step < 5 else StepAction.BUSY_IMAGE], 10
    )
    assert answers[0] == answers[1]
    assert answers[0].index(StepAction.BUSY_IMAGE) == 6 and StepAction.IMAGE not in answers[0][:7]
