"""What the note on ticks says, how rarely it is written, and what readers get."""

from __future__ import annotations

import pytest

from spotkeeper.contract.stack import RENEWED_S, TickNote, tick_note, tick_silence

WHY = "stack/allocation: locked"


def test_success_is_noted_and_renewed_rarely() -> None:
    first = tick_note(None, 1000.0, "")
    assert first == TickNote(1000.0)
    assert tick_note(first, 1000.0 + RENEWED_S - 1, "") is None, "a write for every tick would cost more than the ticks"
    assert tick_note(first, 1000.0 + RENEWED_S, "") == TickNote(1000.0 + RENEWED_S)
    assert tick_note(first, 500.0, "") == TickNote(500.0), "of a clock that was ahead"


def test_a_failure_is_noted_at_once_with_the_start_of_its_series() -> None:
    first = tick_note(TickNote(1000.0), 1060.0, WHY)
    assert first == TickNote(1000.0, failing=1060.0, failed=1060.0, reason=WHY)
    assert tick_note(first, 1120.0, WHY) is None
    assert tick_note(first, 1120.0, "other") == TickNote(1000.0, 1060.0, 1120.0, "other")
    assert tick_note(first, 1060.0 + RENEWED_S, WHY) == TickNote(1000.0, 1060.0, 1060.0 + RENEWED_S, WHY)
    assert tick_note(first, 1120.0, "") == TickNote(1120.0), "one that succeeds ends the row"
    assert tick_note(None, 60.0, WHY) == TickNote(0.0, 60.0, 60.0, WHY)


@pytest.mark.parametrize(
    ("note", "now", "minutes", "told"),
    [
        (None, 1e9, 1, ""),
        (TickNote(1000.0), 1000.0 + RENEWED_S + 180, 1, ""),
        (TickNote(1000.0), 1000.0 + 600, 1, "no tick succeeded for 10 minutes: the function does not run, or cannot"),
        (TickNote(1000.0), 1000.0 + 600, 5, ""),
        (TickNote(1000.0), 1000.0 + 1260, 5, "no tick succeeded for 21 minutes: the function does not run"),
        (TickNote(1000.0, 1060.0, 1060.0, WHY), 1120.0, 1, ""),
        (TickNote(1000.0, 1060.0, 1060.0, WHY), 1060.0 + 2700, 1, f"no tick succeeded for 45 minutes: {WHY}"),
        (TickNote(1000.0, 1060.0, 1060.0, WHY), 1060.0 + 300, 5, ""),
    ],
)
def test_the_silence_warning_claims_only_known_facts(
    note: TickNote | None, now: float, minutes: int, told: str
) -> None:
    said = tick_silence(note, now, minutes)
    assert said.startswith(told) if told else said == ""
