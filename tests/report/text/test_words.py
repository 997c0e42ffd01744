"""Durations, money, losses and counts as text."""

from __future__ import annotations

import pytest

from spotkeeper.contract.ledger import Event
from spotkeeper.report.job.view import job_view
from spotkeeper.report.text.render import job_table
from spotkeeper.report.text.words import count, duration, saved, usd, value_word
from tests.contract.samples import STACK
from tests.report.ledgers import (
    HOUR,
    NOTICED,
    a_record,
    entry,
    intent,
    printed,
)

VALUES = {
    2.113: "2.1130",
    -0.5: "-0.5000",
    0.0: "0",
    0.0123456: "0.01235",
    1e-5: "1e-05",
    1.23456e-5: "1.235e-05",
    12345.6789: "12345.68",
    1234567.0: "1234567",
    1.5e12: "1.5e+12",
    None: "not a number",
    float("nan"): "not a number",
    float("inf"): "inf",
    float("-inf"): "-inf",
}


@pytest.mark.parametrize("value", VALUES)
def test_a_value_of_any_size_keeps_its_digits(value: float | None) -> None:
    assert value_word(value) == VALUES[value]


@pytest.mark.parametrize(
    ("amount", "text"), [(0.01234, "$0.01"), (1.0, "$1.00"), (9.151, "$9.15"), (-1234.5, "-$1,234.50")]
)
def test_money_is_rounded_to_cents(amount: float, text: str) -> None:
    assert usd(amount) == text


@pytest.mark.parametrize(("percent", "text"), [(70.6, "71 % saved"), (-0.4, "0 % saved"), (-9.2, "9 % more")])
def test_higher_costs_are_shown_as_more(percent: float, text: str) -> None:
    assert saved(percent) == text


@pytest.mark.parametrize(
    ("number", "noun", "text"), [(1, "crash", "1 crash"), (2, "crash", "2 crashes"), (0, "VM", "0 VMs")]
)
def test_counts_are_singular_or_plural(number: int, noun: str, text: str) -> None:
    assert count(number, noun) == text


def test_higher_costs_read_alike_in_the_table() -> None:
    dear = (intent(0.0, 0, 1, price=3.3), *NOTICED[1:4], entry(Event.END, HOUR + 5))
    view = job_view(a_record(), None, dear, STACK, now=2 * HOUR)
    assert saved(view.money.saved_percent or 0.0) == "10 % more"
    assert "10 % more" in printed(job_table([view]))


@pytest.mark.parametrize(
    ("seconds_", "text"), [(None, "-"), (0.4, "0s"), (59.4, "59s"), (200, "3m20s"), (7500, "2h05m"), (273600, "3d04h")]
)
def test_durations(seconds_: float | None, text: str) -> None:
    assert duration(seconds_) == text
