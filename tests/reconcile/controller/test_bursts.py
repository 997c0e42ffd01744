"""A round waits for the end of a burst of reports, and for no small gang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from spotkeeper.reconcile.controller.bursts import AGAIN_S, BURST, BURST_WAITS, let_in


@pytest.mark.parametrize(
    ("new", "later", "left_s", "waits"),
    [
        (BURST - 1, (), 60.0, 0),
        (BURST, (BURST - 1,), 60.0, 1),
        (BURST, (BURST, 0), 60.0, 2),
        (BURST, (BURST,) * 9, 60.0, BURST_WAITS),
        (BURST, (), AGAIN_S - 0.1, 0),
        (BURST, (0,), AGAIN_S, 1),
    ],
)
def test_a_round_waits_while_many_reports_come(new: int, later: tuple[int, ...], left_s: float, waits: int) -> None:
    known, counts, waited = 20 + new, [], []
    for more in later:
        known += more
        counts.append(known)
    store: Any = SimpleNamespace(list_facts=lambda _: range(counts.pop(0)))
    deadline: Any = SimpleNamespace(left=lambda: left_s)
    let_in(store, "abcd2345", 20 + new, new, lambda: waited.append(1), deadline)
    assert len(waited) == waits
