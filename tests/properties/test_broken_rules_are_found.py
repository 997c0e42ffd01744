"""The property machine is no better than what it notices: rules of the protocol are taken away, and it must tell.

Not a proof of the rules (``tests/model`` has that), but of the look: a promise that no longer is looked at
would go unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from spotkeeper.contract.allocation import Grant, Tally
from spotkeeper.contract.cloud import Vm
from spotkeeper.contract.job import RequestKind
from spotkeeper.contract.record import Phase, Record, Slot
from spotkeeper.reconcile.controller import tick
from spotkeeper.reconcile.decide import calls
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.gang import generation
from spotkeeper.reconcile.decide.provisioning import reservations
from spotkeeper.reconcile.decide.snapshot import Queries
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.documents import encode_versioned
from spotkeeper.reconcile.store.store import Store
from tests.properties.actors import MAKES, Plan, no_threads
from tests.properties.test_random_stories import look
from tests.properties.world import JOBS, World
from tests.sizes import size

EXAMPLES = 100  # at most; most are noticed in the first few
Patch = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def _one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    no_threads(monkeypatch)


def record_without_a_condition(patch: pytest.MonkeyPatch) -> None:
    def cas(self: Store, record: Record, token: str) -> str:
        return self._objects.put(paths.record(record.job), encode_versioned(record))

    patch.setattr(Store, "cas_record", cas)


def no_cap(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tally, "fits", lambda *_: True)


def slots_given_back_too_early(patch: pytest.MonkeyPatch) -> None:
    def over(draft: Draft, grant: Grant) -> bool:
        live = [
            s.attempt for nodes in (draft.before.nodes, draft.nodes) for s in reservations.live_slots(nodes, grant.node)
        ]
        return grant.attempt not in live and grant.attempt <= draft.nodes[grant.node].top

    patch.setattr(reservations, "_over", over)


def successors_are_deleted(patch: pytest.MonkeyPatch) -> None:
    def superfluous(draft: Draft, index: int, attempt: int, vm: Vm) -> bool:
        cur = draft.nodes[index].cur if index < len(draft.nodes) else None
        return draft.record.over or cur is None or attempt != cur.attempt

    patch.setattr(calls, "_superfluous", superfluous)


def only_older_attempts_are_deleted(patch: pytest.MonkeyPatch) -> None:
    def superfluous(draft: Draft, index: int, attempt: int, vm: Vm) -> bool:
        cur = draft.nodes[index].cur if index < len(draft.nodes) else None
        return draft.record.over or (cur is not None and attempt < cur.attempt)

    patch.setattr(calls, "_superfluous", superfluous)


def a_generation_keeps_its_number(patch: pytest.MonkeyPatch) -> None:
    publish = generation._publish

    def same(draft: Draft, ready: list[int]) -> None:
        publish(draft, ready)
        draft.set(gen=max(1, draft.before.gen))

    patch.setattr(generation, "_publish", same)


def a_silent_zone_is_taken_for_empty(patch: pytest.MonkeyPatch) -> None:
    def gone(self: Queries, node: int, slot: Slot) -> bool:
        return self.vm(node, slot) is None

    patch.setattr(Queries, "gone", gone)


def nobody_sweeps(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tick, "_labelled", lambda listing: set())


PATCHES: tuple[Patch, ...] = (
    record_without_a_condition,
    no_cap,
    slots_given_back_too_early,
    successors_are_deleted,
    only_older_attempts_are_deleted,
    a_generation_keeps_its_number,
    a_silent_zone_is_taken_for_empty,
)


SEVERAL_EXAMPLES = {no_cap, only_older_attempts_are_deleted, a_silent_zone_is_taken_for_empty}  # before it is noticed


@pytest.mark.parametrize(
    "change", size([p for p in PATCHES if p not in SEVERAL_EXAMPLES], PATCHES), ids=lambda change: change.__name__
)
def test_the_search_notices_each_broken_rule(monkeypatch: pytest.MonkeyPatch, change: Patch) -> None:
    change(monkeypatch)
    with pytest.raises((AssertionError, ExceptionGroup)):
        look(EXAMPLES)


# Two that need a long story: told, not looked for.


def call_after_the_end() -> None:
    """A round stops before its insert; the job is cancelled and DONE; then the call reaches the cloud."""
    world = World()
    world.submit(JOBS[0])
    world.round(JOBS[0], Plan(freeze_on=MAKES, thaw_after=1000))
    assert world.actors
    for key in [key for key in world.bucket.blobs if key.endswith("/lease")]:
        del world.bucket.blobs[key]
    world.request(JOBS[0], RequestKind.CANCEL)
    world.until(lambda: world.record(JOBS[0]).phase is Phase.DONE, "the end")
    world.thaw()
    assert world.plane.vms(), "the late machine is there"
    world.until(world.clean, "nothing left")
    world.close()


def hung_member_with_a_disk() -> None:
    """It shall be swapped and hears nothing; its successor, who stands by, gets the disk only when it is gone."""
    world = World()
    world.submit(JOBS[0])
    world.until(lambda: world.training(JOBS[0]), "training")
    guest = next(guest for guest in world.guests.values() if guest.node == 0)
    world.advance(30)
    guest.hung = True
    world.request(JOBS[0], RequestKind.SWAP, node=0)
    world.until(lambda: world.record(JOBS[0]).gen == 2 and world.training(JOBS[0]), "training again")
    world.close()


@pytest.mark.parametrize("story", [call_after_the_end, hung_member_with_a_disk], ids=lambda story: story.__name__)
def test_a_long_random_story_keeps_the_rules(story: Callable[[], None]) -> None:
    story()


def test_the_search_notices_a_missing_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody_sweeps(monkeypatch)
    with pytest.raises(AssertionError, match="nothing left"):
        call_after_the_end()
