"""What the exhaustive search has found in ``decide()``, each as the shortest story of a few passes."""

from __future__ import annotations

from dataclasses import replace as with_

from spotkeeper.reconcile.decide import decide
from spotkeeper.spec.facts import Kind

from tests.reconcile.test_decide import NOW, fact, gang


def test_a_notice_that_outlived_its_deadline_does_not_make_a_generation_in_every_pass() -> None:
    """The machine is still there a minute after its time: every pass stopped the job and began it anew."""
    record, seen = gang(1)
    seen = with_(seen, facts=(*seen.facts, fact(0, Kind.NOTICE, f"{NOW - 600:.0f}")))
    for _ in range(4):
        decision = decide(record, seen)
        record = decision.record or record
        seen = with_(seen, alloc=decision.grants or seen.alloc)
    assert record.gen == 3
    assert not record.stop
    assert record.ranks[0].next is not None  # its successor comes all the same
