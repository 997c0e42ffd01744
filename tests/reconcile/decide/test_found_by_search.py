"""What the exhaustive search has found in ``decide()``, each as the shortest story of a few passes."""

from __future__ import annotations

from dataclasses import replace as with_

from msgspec.structs import replace

from spotkeeper.contract.allocation import Grant
from spotkeeper.contract.facts import Kind
from spotkeeper.contract.record import Phase, Roll
from spotkeeper.reconcile.controller.document import Speaker, place
from spotkeeper.reconcile.decide import decide
from tests.reconcile.decide.test_decide import NOW, fact, gang
from tests.reconcile.world import JOB


def test_an_expired_notice_starts_no_generation_in_every_pass() -> None:
    """The machine is still there a minute after its time: every pass stopped the job and began it anew."""
    record, seen = gang(1)
    seen = with_(seen, facts=(*seen.facts, fact(0, Kind.NOTICE, f"{NOW - 600:.0f}")))
    for _ in range(4):
        decision = decide(record, seen)
        record = decision.record or record
        seen = with_(seen, allocation=decision.grants or seen.allocation)
    assert record.gen == 3
    assert not record.stop
    assert record.nodes[0].next is not None  # its successor comes all the same


def test_a_roll_call_for_silence_does_not_cut_the_save_of_a_notice() -> None:
    """Everyone answers, a machine has an hour left: the job was stopped at once, with no time to save."""
    record, seen = gang(1, roll=Roll(40, NOW - 10, "silence"))
    record = replace(record, gen_since=NOW - 300)
    facts = (fact(0, Kind.HERE, "40"), fact(0, Kind.NOTICE, f"{NOW + 3600:.0f}"))
    decision = decide(record, with_(seen, facts=(*seen.facts, *facts), grants_first=False))
    assert decision.record is not None
    assert decision.record.roll is None
    assert not decision.record.stop


def test_a_static_machine_granted_at_a_resume_is_not_released() -> None:
    """The grant is written before the record: told to go, the node dropped the attempt before it began, and
    the word stood: later the node was taken back while it trained."""
    record, seen = gang(1, phase=Phase.HOLD)
    machine = Speaker("n0", "sk-m-s-s0", "z-a")
    grant = Grant(JOB, 0, record.nodes[0].top + 1, "machine:sk-m-s-s0")
    assert place(record, seen.stack, machine, grant) is None  # nobody knows it yet: it asks again
    ended = place(replace(record, phase=Phase.END), seen.stack, machine, grant)
    assert ended is not None
    assert ended.slot is None  # superseded: it gives its word, and the grant goes back
