"""The shipped ``decide()`` in every state of small worlds, and proof that the search sees what is broken.

Each story bounds ranks, rounds and faults. Those marked whole are explored to their end; the others within
their share of a minute, and prove only what they reached. A mutant takes one rule away; the search must find
a story that breaks, or it could not be trusted when it finds none.
"""

from __future__ import annotations

import time

import pytest
from spotkeeper.reconcile.decide import calls, ended, generation, grants, needs
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.seen import View
from spotkeeper.spec.cloud import Vm, VmStatus
from spotkeeper.spec.facts import Fact, Kind
from spotkeeper.spec.record import Grant, Phase, Slot

from tests.model.search import search
from tests.model.small_world import Faults, S, SmallWorld, Story

SHARE_S = 4.0

WHOLE = {
    "one rank is killed, two rounds": Story(1, True, 2, Faults(kills=1, attempts=3)),
    "sharded, killed, two rounds": Story(1, False, 2, Faults(kills=1, attempts=3)),
    "notice and reprieve": Story(1, True, 1, Faults(notices=1, reprieves=1, attempts=3)),
    "reboot and kill": Story(1, True, 1, Faults(reboots=1, kills=1)),
    "two ranks, one is killed": Story(2, True, 1, Faults(kills=1)),
}
WITHIN_A_SHARE = {
    "two ranks, two kills": Story(2, True, 1, Faults(kills=2, attempts=3)),
    "two ranks, notice and reprieve": Story(2, True, 1, Faults(notices=1, reprieves=1, attempts=3)),
    "refused, cancelled, two rounds": Story(1, True, 2, Faults(refusals=1, cancels=1, attempts=3)),
    "every deadline may pass, two rounds": Story(1, True, 2, Faults(lates=1, kills=1, attempts=3)),
    "a zone does not answer, two rounds": Story(1, True, 2, Faults(blinds=1, kills=1, notices=1, attempts=3)),
    "a swap, two rounds": Story(1, True, 2, Faults(swaps=1, kills=1, attempts=3)),
    "two ranks sharded, notice and kill": Story(2, False, 1, Faults(kills=1, notices=1, attempts=3)),
}


@pytest.mark.parametrize("name", WHOLE)
def test_every_state_is_safe_and_ends_well(name: str) -> None:
    found = search(SmallWorld(WHOLE[name]), limit_s=60.0)
    assert found.why == "", "\n".join(found.story)
    assert found.whole
    assert found.states > 1000


@pytest.mark.parametrize("name", WITHIN_A_SHARE)
def test_every_state_reached_in_its_share_is_safe_and_ends_well(name: str) -> None:
    found = search(SmallWorld(WITHIN_A_SHARE[name]), limit_s=SHARE_S)
    assert found.why == "", "\n".join(found.story)
    assert found.states > 500


# -- mutants: each takes one rule away


def breaks(story: Story, world: type[SmallWorld] = SmallWorld) -> str:
    begin = time.monotonic()
    found = search(world(story), limit_s=30.0)
    assert found.why, f"the mutant survived {found.states} states in {time.monotonic() - begin:.0f} s"
    return found.why


class NoCas(SmallWorld):
    """Rule 1 away: a slow round overwrites what others decided."""

    def _act(self, s: S, index: int, r):  # type: ignore[no-untyped-def]
        if r.decision is not None and r.decision.record is not None:
            r = r._replace(record=s.record)
        return super()._act(s, index, r)


def test_without_compare_and_swap_the_record_goes_back() -> None:
    why = breaks(Story(1, True, 2, Faults(kills=1, attempts=3)), NoCas)
    assert "back" in why or "live" in why or "two members" in why or "train" in why


def test_an_unanswered_zone_taken_as_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(self: View, rank: int, slot: Slot) -> bool:
        vm = self.vm(rank, slot)
        return vm is None or vm.status is not VmStatus.RUNNING

    monkeypatch.setattr(View, "gone", gone)
    assert "healthy member" in breaks(Story(1, True, 1, Faults(blinds=2)))


def test_collecting_only_what_is_older_than_cur(monkeypatch: pytest.MonkeyPatch) -> None:
    def superfluous(draft: Draft, index: int, attempt: int, vm: Vm) -> bool:
        cur = draft.ranks[index].cur
        return draft.record.phase is not Phase.RUN or (cur is not None and attempt < cur.attempt)

    monkeypatch.setattr(calls, "_superfluous", superfluous)
    breaks(Story(1, True, 1, Faults(notices=1, reprieves=1, attempts=3)))


def test_collecting_everything_but_cur(monkeypatch: pytest.MonkeyPatch) -> None:
    def superfluous(draft: Draft, index: int, attempt: int, vm: Vm) -> bool:
        cur = draft.ranks[index].cur
        return cur is None or attempt != cur.attempt

    monkeypatch.setattr(calls, "_superfluous", superfluous)
    assert "live" in breaks(Story(1, True, 1, Faults(notices=1)))


def test_promoting_an_intent_while_cur_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    def promote(draft: Draft) -> None:
        for index, rank in enumerate(draft.ranks):
            if needs.needed(rank) and rank.next is not None:
                draft.promote(index, "notice")

    monkeypatch.setattr(needs, "_promote", promote)
    assert "not all train" in breaks(Story(1, True, 1, Faults(swaps=1)))


def test_admitting_by_machine_without_its_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    def hello(self: View, rank: int, slot: Slot) -> tuple[Vm, Fact] | None:
        vm = self.vm(rank, slot)
        if vm is None or slot.uid is not None:
            return None
        said = [f for f in self.facts.get((rank, slot.attempt), ()) if f.kind is Kind.HELLO and f.uid == vm.uid]
        return (vm, said[0]) if said else None

    monkeypatch.setattr(View, "hello", hello)
    assert "train" in breaks(Story(1, True, 1, Faults(reboots=1)))


def test_done_before_everything_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(draft: Draft) -> None:
        if draft.record.phase is Phase.END:
            draft.set(phase=Phase.DONE)

    monkeypatch.setattr(ended, "step", step)
    monkeypatch.setattr(
        calls, "plan", lambda draft, plan=calls.plan: () if draft.record.phase is Phase.DONE else plan(draft)
    )
    assert "ended, but" in breaks(Story(1, True, 1, Faults(cancels=1)))


def test_a_slot_released_while_its_machine_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def over(draft: Draft, grant: Grant) -> bool:
        return grant.attempt <= draft.ranks[grant.rank].top

    monkeypatch.setattr(grants, "_over", over)
    assert "grants" in breaks(Story(1, True, 1, Faults()))


def test_a_disk_that_came_back_late_taken_for_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "holds", lambda draft, index, slot: True)
    assert "starts from commit" in breaks(Story(2, True, 1, Faults(kills=2, attempts=3)))


def test_a_generation_without_its_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "_disks", lambda draft, ready: True)
    assert "nobody can write" in breaks(Story(1, True, 1, Faults()))


def test_a_generation_before_everyone_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a safety matter for the machines, but for the promise: the save of a notice would be cut short."""
    monkeypatch.setattr(Draft, "halted", lambda self: True)
    story = Story(2, True, 1, Faults(swaps=1))
    world = SmallWorld(story)
    seen = []

    def publish(draft: Draft, ready: list[int], real=generation._publish) -> None:  # type: ignore[no-untyped-def]
        early = draft.record.stop and any(
            not draft.view.ended(i, s, draft.record.gen) for i, s in draft.members() if draft.record.gen
        )
        seen.append(early)
        real(draft, ready)

    monkeypatch.setattr(generation, "_publish", publish)
    search(world, limit_s=10.0)
    assert any(seen)


def test_numbers_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dropped intent's number is used again: its key is dead, or its machine is the twin's."""
    real = Draft.vacate

    def vacate(self: Draft, index: int, cause: str) -> None:
        real(self, index, cause)
        self.put(index, top=self.ranks[index].top - 1)

    monkeypatch.setattr(Draft, "vacate", vacate)
    assert "train" in breaks(Story(1, True, 1, Faults(kills=1)))
